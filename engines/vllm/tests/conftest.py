"""Checkpoints of all families and a server that has their experts, for the whole session."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import FAMILIES, make_checkpoint
from tests.generating import Outcome, end, generate
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
def plain(checkpoints: dict[str, Path]) -> Iterator[Callable[..., Outcome]]:
    """What vLLM with its own experts says: `plain(family, **options)`."""
    known: dict[str, Outcome] = {}

    def outcome(family: str, **options: Any) -> Outcome:
        key = json.dumps([family, options])
        if key not in known:
            known[key] = generate(checkpoints[family], **options)
        return known[key]

    yield outcome
    end()
