"""What the soak of a pool takes for a mistake."""

from typing import Any

import pytest

from tests.soak.pool import mistakes

GOOD: dict[str, Any] = {
    "calls": 10_000, "lost": 0, "wrong": 0, "late": 10, "events": {"kill": 1, "stop": 1, "drain": 2},
    "times": {"calm": {"p99_ms": 20.0}, "kill": {"p99_ms": 60.0}, "stop": {"p99_ms": 9.0}, "drain": {}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "text", "depends_on_time"),
    [
        ({"lost": 1}, "lost: expected 0, got 1", False),
        ({"wrong": 2}, "wrong: expected 0, got 2", False),
        ({"late": 11}, "late: expected at most 0.1 % of 10000, got 11", True),
        ({"events": {"kill": 9}}, "events: expected each of kill, stop, drain, got {'kill': 9}", False),
        (
            {"times": GOOD["times"] | {"stop": {"p99_ms": 61.0}}},
            "p99: expected at most 3 times 20.0 ms during stop, got 61.0",
            True,
        ),
    ],
)
def test_mistakes_are_named(changed: dict[str, Any], text: str, depends_on_time: bool) -> None:
    assert mistakes(GOOD) == []
    assert mistakes(GOOD | changed) == [text]
    assert mistakes(GOOD | changed, is_quiet=False) == ([] if depends_on_time else [text])
