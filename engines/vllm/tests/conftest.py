"""Checkpoints of all families and a server that has their experts, for the whole session."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.checkpoints import FAMILIES, make_checkpoint
from tests.generating import Outcome, generate
from tests.running import Running, running_expertd


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory for each family."""
    parent = tmp_path_factory.mktemp("checkpoints")
    for family in FAMILIES:
        make_checkpoint(parent / family, family)
    return {family: parent / family for family in FAMILIES}


@pytest.fixture(scope="session")
def expertd(tmp_path_factory: pytest.TempPathFactory, checkpoints: dict[str, Path]) -> Iterator[Running]:
    """For tests that do not end it."""
    with running_expertd(tmp_path_factory.mktemp("expertd"), *checkpoints.values()) as running:
        yield running


@pytest.fixture(scope="session")
def plain(checkpoints: dict[str, Path]) -> Callable[..., Outcome]:
    """What vLLM with its own experts says: `plain(family, dtype, **options)`."""

    @cache
    def outcome(family: str, dtype: str, **options: object) -> Outcome:
        return generate(checkpoints[family], dtype=dtype, **options)

    return outcome
