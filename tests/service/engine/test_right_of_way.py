"""The threads of other lanes do their work while the first lane's step runs on the device."""

import threading
import time

import pytest

from expertd.service.engine.right_of_way import Faster, Others, RightOfWay, Slower
from tests.service.engine.test_wakeup import Bell


def seconds_of(others: Others, busy: float = 60.0) -> float:
    began = time.perf_counter()
    others.give_way(lambda: busy)
    return time.perf_counter() - began


def test_others_wait_for_a_step_of_the_first_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertd.service.engine.right_of_way._RECENT_SECONDS", 30.0)
    monkeypatch.setattr("expertd.service.engine.right_of_way._MOST_SECONDS", 30.0)
    way = RightOfWay()
    way.enabled = True
    first, other = Slower(way, lambda: False), Faster(way)
    assert seconds_of(other) < 5, "there has been none"
    first.step_runs()
    assert seconds_of(other) < 5, "it runs"
    first.step_ended()
    waits = threading.Thread(target=seconds_of, args=(other,))
    waits.start()
    waits.join(0.05)
    assert waits.is_alive(), "the next request may come"
    first.step_runs()
    waits.join(10)
    assert not waits.is_alive()


@pytest.mark.parametrize("recent", [0.0, 30.0])
def test_a_wait_is_short(recent: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertd.service.engine.right_of_way._RECENT_SECONDS", recent)
    monkeypatch.setattr("expertd.service.engine.right_of_way._MOST_SECONDS", 0.2)
    way = RightOfWay()
    way.enabled = True
    first, other = Slower(way, lambda: False), Faster(way)
    first.step_runs()
    first.step_ended()
    assert (seconds_of(other) >= 0.2) == bool(recent)
    assert seconds_of(other, busy=0.01) < 0.2, "the device needs work"
    way.enabled = False
    assert seconds_of(other) < 0.2


@pytest.mark.parametrize("asleep", [False, True])
def test_each_thread_polls_the_sources_of_its_lane(asleep: bool) -> None:
    """The first lane's also those of others that are asleep."""
    first, other, bell = Slower(RightOfWay(), lambda: asleep), Faster(RightOfWay()), Bell()
    assert (first.leaves(bell), other.leaves(bell), Others().leaves(bell)) == (False, True, False)
    bell.lane = 1
    assert (first.leaves(bell), other.leaves(bell), Others().leaves(bell)) == (not asleep, False, False)
    bell.close()
