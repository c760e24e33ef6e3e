"""A deadline that is moved with every request, without a new timer of the event loop each time."""

import asyncio
from collections.abc import Callable


class Timer:
    """Calls `then` once, `seconds` after the last `set`, unless `clear` is called before."""

    __slots__ = ("_handle", "_loop", "_then", "_when")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._when = 0.0
        self._then: Callable[[], object] | None = None
        self._handle: asyncio.TimerHandle | None = None

    def set(self, seconds: float, then: Callable[[], object]) -> None:
        """Replace the deadline."""
        self._when = when = self._loop.time() + seconds
        self._then = then
        # A handle that fires too early is renewed then.
        if self._handle is None or self._handle.when() > when:
            self._schedule()

    def clear(self) -> None:
        """Have no deadline."""
        self._then = None

    def close(self) -> None:
        """Clear it for good: nothing of the event loop refers to it any more."""
        self._then = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _schedule(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_at(self._when, self._fire)

    def _fire(self) -> None:
        self._handle = None
        then = self._then
        if then is None:
            return
        if self._loop.time() < self._when:
            self._schedule()
            return
        self._then = None
        then()
