"""What a soak counts, and what it calls a mistake. `make test-all` runs a short one."""

from typing import Any

import grpc
import pytest

from expertd_client import (
    AccessDeniedError,
    DeadlineError,
    ExpertError,
    ServerBusyError,
    ServerUnreachableError,
    UnknownModelError,
)
from tests.service.apps import tiny_settings
from tests.soak.callers import outcome_of, outcome_of_rpc
from tests.soak.plan import Plan
from tests.soak.reference import samples
from tests.soak.soaking import growth_of, mistakes
from tests.soak.tally import OUTCOMES, Phase, Stage


def test_a_wrong_answer_is_found() -> None:
    one, other, *_ = samples(tiny_settings(), 2, {1: 1})
    assert one.is_right(one.output)
    assert one.is_right(1.001 * one.output)
    assert not one.is_right(other.output)
    assert not one.is_right(1.1 * one.output)
    assert not one.is_right(one.output[:0])


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


class RpcError(Exception):
    """An error of a gRPC call."""

    def __init__(self, code: grpc.StatusCode, details: str, *trailers: tuple[str, str]) -> None:
        self.code, self.details, self.trailing_metadata = lambda: code, lambda: details, lambda: trailers


@pytest.mark.parametrize(
    ("error", "if_late", "otherwise"),
    [
        (RpcError(grpc.StatusCode.DEADLINE_EXCEEDED, "late"), "refused", "lost"),
        (RpcError(grpc.StatusCode.UNAVAILABLE, "timeout: expected about 9, got 2"), "refused", "lost"),
        (RpcError(grpc.StatusCode.UNAVAILABLE, "full", ("grpc-retry-pushback-ms", "1000")), *["refused"] * 2),
        (RpcError(grpc.StatusCode.UNAVAILABLE, "Socket closed"), *["lost"] * 2),
        (RpcError(grpc.StatusCode.INTERNAL, "x"), *["failed"] * 2),
    ],
)
def test_what_errors_over_grpc_mean(tmp_path: Any, error: RpcError, if_late: str, otherwise: str) -> None:
    stage = Stage()
    plan, mark = Plan(tmp_path, 1, 2, [], stage), stage.mark
    assert outcome_of_rpc(error, plan, mark, True) == if_late
    assert outcome_of_rpc(error, plan, mark, False) == otherwise


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


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"total": {**GOOD["total"], "lost": 1}}, "lost: expected 0, got 1"),
        ({"total": {**GOOD["total"], "wrong": 2}}, "wrong: expected 0, got 2"),
        ({"total": {**GOOD["total"], "failed": 3}}, "failed: expected 0, got 3"),
        ({"unaccounted": 1}, "requests without an outcome: expected 0, got 1"),
        ({"memory": {"growth": 0.05}}, "growth of memory: expected at most 2%, got 5.0%"),
        ({"descriptors": {"growth": 0.03}}, "growth of descriptors: expected at most 2%, got 3.0%"),
        ({"device_memory": {"growth": 0.1}}, "growth of device_memory: expected at most 2%, got 10.0%"),
        ({"exit_codes": [1, 0, 0]}, "exit code: expected 0, got 1"),
        ({"callers_ended_with": {"gRPC": 1}}, "gRPC: expected callers without errors, got exit code 1"),
        ({"mistakes": ["Traceback"]}, "log: expected no such line, got Traceback"),
        ({"kinds": {"HTTP": {"right": 0}}}, "HTTP: expected right answers, got none"),
    ],
)
def test_each_mistake_is_a_sentence(change: dict[str, Any], text: str) -> None:
    assert mistakes(GOOD, 0.02) == []
    assert mistakes({**GOOD, **change}, 0.02) == [text]
