"""What a soak counts, and what it calls a mistake. `make test-all` runs a short one."""

from typing import Any

import pytest

from expertd_client import (
    AccessDeniedError,
    DeadlineError,
    ExpertError,
    ServerBusyError,
    ServerUnreachableError,
    UnknownModelError,
)
from tests.soak.callers import outcome_of
from tests.soak.plan import Plan
from tests.soak.soaking import growth_of, mistakes
from tests.soak.tally import OUTCOMES, Phase, Stage


def test_a_fall_does_not_hide_growth() -> None:
    """As of memory that is given back at once, before and after which it grows."""
    level = [1000, 1010, 1000, 990, 1000, 1010] * 10
    assert growth_of(level) == pytest.approx(0.0, abs=0.01)
    rising = [1000 + place for place in range(60)]
    assert growth_of(rising) == pytest.approx(0.05, abs=0.005)
    assert growth_of(rising + [value - 300 for value in rising]) == pytest.approx(0.06, abs=0.01)
    assert growth_of([]) == 0.0
    assert growth_of([0, 0, 0]) == 0.0


def test_what_errors_mean(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    stage = Stage()
    plan, mark = Plan(tmp_path, 1, 2, [], stage), stage.mark
    gone, late, denied = ServerUnreachableError("x"), DeadlineError("x"), AccessDeniedError("x", 401)
    assert outcome_of(ServerBusyError("x", 503), plan, mark) == "refused"
    assert outcome_of(denied, plan, mark, may_be_denied=True) == "refused"
    assert outcome_of(denied, plan, mark) == "wrong"
    assert outcome_of(UnknownModelError("x", 404), plan, mark, may_be_gone=True) == "refused"
    assert outcome_of(UnknownModelError("x", 404), plan, mark) == "wrong"
    assert outcome_of(ExpertError("x", 500), plan, mark) == "failed"
    assert outcome_of(late, plan, mark, may_be_late=True) == "refused"
    assert [outcome_of(error, plan, mark) for error in (gone, late)] == ["lost", "lost"]
    stage.phase = Phase.STOPPING
    assert [outcome_of(error, plan, mark) for error in (gone, late)] == ["cut", "cut"]
    assert outcome_of(gone, plan, mark, is_whole=True) == "lost", "before SIGTERM"
    assert outcome_of(gone, plan, stage.mark, is_whole=True) == "cut", "after the phase changed"
    stage.phase = Phase.SERVING
    assert outcome_of(gone, plan, mark) == "cut", "another server since"
    assert outcome_of(gone, plan, mark, is_whole=True) == "lost", "noticed late"
    stage.finish()
    assert outcome_of(gone, plan, stage.mark) == "lost", "it serves until callers have their answers"
    mark, stage.phase = stage.mark, Phase.KILLED
    assert outcome_of(gone, plan, mark, is_whole=True) == "cut", "SIGKILL may lose it"
    assert outcome_of(gone, plan, stage.mark) == "cut", "nobody serves"
    assert "AccessDeniedError" in capsys.readouterr().out


GOOD: dict[str, Any] = {
    "total": dict.fromkeys(OUTCOMES, 0),
    "unaccounted": 0,
    "kinds": {"HTTP": {"right": 1}},
    "memory": {"growth": 0.01},
    "descriptors": {"growth": 0.0},
    "device_memory": {"growth": 0.0},
    "exit_codes": [0, 0, 0],
    "callers_ended_with": {},
    "mistakes": [],
}


CHANGES: list[tuple[dict[str, Any], str]] = [
    *(
        ({"total": {**GOOD["total"], name: 2}}, f"{name}: expected 0, got 2")
        for name in ("lost", "wrong", "failed")
    ),
    *(
        ({name: {"growth": 0.05}}, f"growth of {name}: expected at most 2%, got 5.0%")
        for name in ("memory", "descriptors", "device_memory")
    ),
    ({"unaccounted": 1}, "requests without an outcome: expected 0, got 1"),
    ({"exit_codes": [1, 0, 0]}, "exit code: expected 0, got 1"),
    ({"callers_ended_with": {"gRPC": 1}}, "gRPC: expected callers without errors, got exit code 1"),
    ({"mistakes": ["Traceback"]}, "log: expected no such line, got Traceback"),
    ({"kinds": {"HTTP": {"right": 0}}}, "HTTP: expected right answers, got none"),
]


def test_each_mistake_is_a_sentence() -> None:
    assert mistakes(GOOD, 0.02) == []
    for change, text in CHANGES:
        assert mistakes({**GOOD, **change}, 0.02) == [text]
