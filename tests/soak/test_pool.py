"""What the soak of a pool takes for a mistake."""

from typing import Any

import pytest

from tests.soak.pool import mistakes

GOOD: dict[str, Any] = {
    "calls": 10_000, "lost": 0, "wrong": 0, "late": 10, "events": {"kill": 1, "stop": 1, "drain": 2},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"lost": 1}, "lost: expected 0, got 1"),
        ({"wrong": 2}, "wrong: expected 0, got 2"),
        ({"late": 11}, "late: expected at most 0.1 % of 10000, got 11"),
        ({"events": {"kill": 9}}, "events: expected each of kill, stop, drain, got {'kill': 9}"),
    ],
)
def test_mistakes_are_named(changed: dict[str, Any], text: str) -> None:
    assert mistakes(GOOD) == []
    assert mistakes(GOOD | changed) == [text]
