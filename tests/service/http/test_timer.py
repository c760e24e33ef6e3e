"""A deadline that moves; time is the test's own."""

import asyncio
from collections.abc import Callable
from typing import cast

from expertd.service.http.timer import Timer


class Loop:
    """The part of an event loop that a timer uses; runs what is due when its time is advanced."""

    def __init__(self) -> None:
        self.now = 100.0
        self.handles: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], object]) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, (), self.typed)
        self.handles.append(handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self.handles.remove(handle)

    def get_debug(self) -> bool:
        return False

    @property
    def typed(self) -> asyncio.AbstractEventLoop:
        return cast(asyncio.AbstractEventLoop, self)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for handle in [handle for handle in self.handles if handle.when() <= self.now]:
            self.handles.remove(handle)
            handle._run()


def test_it_fires_once_after_the_last_deadline() -> None:
    loop, fired = Loop(), list[float]()
    timer = Timer(loop.typed)
    timer.set(10, lambda: fired.append(loop.now))
    loop.advance(9)
    timer.set(10, lambda: fired.append(loop.now))
    assert len(loop.handles) == 1, "the timer is moved without another one"
    loop.advance(9)
    assert fired == []
    loop.advance(1)
    assert fired == [119]
    loop.advance(100)
    assert fired == [119]
    assert loop.handles == []


def test_an_earlier_deadline_is_kept() -> None:
    loop, fired = Loop(), list[str]()
    timer = Timer(loop.typed)
    timer.set(75, lambda: fired.append("idle"))
    timer.set(10, lambda: fired.append("head"))
    loop.advance(10)
    assert fired == ["head"]
    assert loop.handles == []


def test_a_cleared_deadline_never_fires() -> None:
    loop, fired = Loop(), list[str]()
    timer = Timer(loop.typed)
    timer.set(1, lambda: fired.append("cleared"))
    timer.clear()
    loop.advance(2)
    timer.set(1, lambda: fired.append("closed"))
    timer.close()
    assert loop.handles == []
    loop.advance(2)
    assert fired == []
    timer.set(1, lambda: fired.append("set again"))
    loop.advance(1)
    assert fired == ["set again"]
