"""A request's `timeout`, or its call's deadline: from its complete body until its answer is ready."""

import asyncio
import time
from collections.abc import Callable

from expertd.service.engine.errors import QueueTimeoutError


class RequestDeadline:
    """Calls `passed` `seconds` after `since`, by time.perf_counter, unless `cancel` is called before.

    name  what it is of the request, in errors
    """

    __slots__ = ("_name", "_seconds", "_timer", "_when")

    def __init__(
        self,
        seconds: float,
        since: float,
        loop: asyncio.AbstractEventLoop,
        passed: Callable[[], object],
        name: str = "timeout",
    ) -> None:
        self._name = name
        self._seconds = seconds
        self._when = since + seconds
        self._timer = loop.call_later(self.left, passed)

    @property
    def left(self) -> float:
        """Seconds until it passes; 0 or less: it has passed, though `passed` may not have been called yet."""
        return self._when - time.perf_counter()

    def error(self, where: str) -> QueueTimeoutError:
        """The refusal of a request for which it passed `where`."""
        return QueueTimeoutError(
            f"the request's {self._name} of {round(self._seconds * 1e6)} microseconds expired {where}"
        )

    def cancel(self) -> None:
        """Do not call `passed` any more."""
        self._timer.cancel()
