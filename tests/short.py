"""Tables of which `make test` runs a few rows, and `make test-all` the others."""

from collections.abc import Collection, Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")


def few_of(rows: Iterable[T], few: Collection[T]) -> list[object]:
    """Arguments of a test: all of `rows`, those beside `few` with the mark `thorough`."""
    rows = list(rows)
    assert all(row in rows for row in few)
    return [row if row in few else pytest.param(row, marks=pytest.mark.thorough) for row in rows]
