"""What the soaks of pools take for a mistake, and to which event they count a call."""

from typing import Any

import pytest

from tests.soak.events import EventSoak, mistakes

GOOD: dict[str, Any] = {
    "calls": 10_000, "lost": 0, "wrong": 0, "late": 10, "waits": [],
    "events": {"kill": 1, "stop": 1, "drain": 2},
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


def test_calls_may_wait_for_a_server_that_is_stopped() -> None:
    slow = {"times": GOOD["times"] | {"stop": {"p99_ms": 61.0}}, "waits": ["stop"]}
    assert mistakes(GOOD | slow) == []


class Scripted(EventSoak):
    """Where a test says what happens."""

    def happens(self, event: str) -> None:
        """An event begins, or, "calm", ends."""
        self._when = event
        if event != "calm":
            self._events.append(event)

    def calls(self, *whens: str) -> list[str]:
        """What happens during a call; those it is counted to."""
        began = self.begin()
        for when in whens:
            self.happens(when)
        before = {when: len(seconds) for when, seconds in self._times.items()}
        self.count(began, is_right=True)
        return [when for when, seconds in self._times.items() if len(seconds) > before[when]]


def test_a_call_belongs_to_an_event_that_it_has_seen() -> None:
    soak = Scripted(1.0, 1.0, late=0.0, seed=0, waits=["stop"])
    assert soak.calls() == ["calm"]
    assert soak.calls("kill") == ["kill"]
    assert soak.calls("calm") == ["kill"]
    assert soak.calls() == ["calm"]
    assert soak.calls("stop", "calm") == ["stop"]
    assert soak.calls("drain", "calm") == ["drain"]
    times = soak.result()["times"].values()
    assert [each["calls"] for each in times] == [2, 2, 1, 1]
    assert all(0 <= each["p50_ms"] <= each["p99_ms"] <= each["max_ms"] for each in times)
    assert soak.result()["late"] == 5, "all took longer than no time, but those during a stop may"
