"""Imports without collections."""

import gc
from collections.abc import Iterator

import pytest

from expertd.service.imports import quick_imports


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    gc.unfreeze()


def collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())


def test_nothing_is_collected_during_imports_nor_what_they_made_afterwards() -> None:
    with quick_imports():
        before = collections()
        made = [[index] for index in range(100_000)]
        assert collections() == before
    assert gc.get_freeze_count() > len(made)
    del made
    more = [[index] for index in range(100_000)]
    assert collections() > before
    assert len(more) == 100_000


def test_an_import_that_fails_leaves_the_collector_enabled() -> None:
    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()
