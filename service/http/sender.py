"""The sending side of a connection: whether the transport holds bytes, and how fast the client reads."""

import asyncio
from collections.abc import Callable


class Sender:
    """Watches what the transport could not send at once.

    `sent` is called when the transport has sent everything: it refers to no written memory any more.
    `stalled` is called when the client has read less than `min_bytes`, and not all, in `seconds`. So an
    answer of n bytes is held for at most `seconds` times n / `min_bytes`, rounded up.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        min_bytes: int,
        sent: Callable[[], object],
        stalled: Callable[[], object],
    ) -> None:
        self.holds_bytes = False
        self._transport = transport
        self._loop = loop
        self._seconds = seconds
        self._min_bytes = min_bytes
        self._sent = sent
        self._stalled = stalled
        self._timer: asyncio.Handle | None = None
        self._unsent = 0
        self._waiting: list[asyncio.Future[None]] = []
        # So the transport reports every write that it could not finish, and the end of it.
        transport.set_write_buffer_limits(high=0)

    def pause(self) -> None:
        """The transport holds bytes."""
        self.holds_bytes = True
        # Soon, because more of the same answer may be written at once.
        self._timer = self._loop.call_soon(self._watch)

    def resume(self) -> None:
        """The transport has passed everything on."""
        self.stop()
        self._sent()

    def stop(self) -> None:
        """Everything is sent, or lost."""
        self.holds_bytes = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self) -> None:
        """Wait until everything is sent, or lost."""
        if self.holds_bytes:
            self._waiting.append(future := self._loop.create_future())
            await future

    def _watch(self) -> None:
        self._unsent = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(self._seconds, self._check_progress)

    def _check_progress(self) -> None:
        if self._transport.get_write_buffer_size() > self._unsent - self._min_bytes:
            self._stalled()
        else:
            self._watch()
