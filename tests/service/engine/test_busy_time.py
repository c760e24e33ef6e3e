"""How long some requests have been there, from their submission to their answers."""

from types import SimpleNamespace

import pytest

from expertd.service.engine import busy_time
from expertd.service.engine.busy_time import BusyTime


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(busy_time, "time", SimpleNamespace(perf_counter=lambda: self.now))


def test_time_counts_once_however_many_requests_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy = Clock(monkeypatch), BusyTime()
    answers: list[object] = []
    assert busy.so_far() == (0.0, 0)
    first = busy.begun(8, answers.append)
    clock.now += 1
    second = busy.begun(16, answers.append)
    clock.now += 2
    first(b"output")
    assert busy.so_far() == (3.0, 8)
    clock.now += 4
    second(b"other")
    clock.now += 8
    assert busy.so_far() == (7.0, 24)
    assert answers == [b"output", b"other"]
    busy.begun(1, answers.append)
    clock.now += 1
    assert busy.so_far() == (8.0, 24)


def test_tokens_without_output_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy = Clock(monkeypatch), BusyTime()
    answers: list[object] = []
    error = ValueError("no")
    failed = busy.begun(8, answers.append)
    busy.begun(8, answers.append)
    busy.end()  # it was refused
    clock.now += 1
    failed(error)
    assert (busy.so_far(), answers) == ((1.0, 0), [error])
