"""The timeouts of a connection: idle, stalled while it should read, and one for other input."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class TimedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, with a timeout wherever it waits for a client.

    The keep-alive timeout (timeout_keep_alive) also applies before the first request, and to clients that
    read nothing of a response.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._gone = False  # the client disconnected, or was cut off: unsent data is lost
        self._timer: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = self._gone or exc is not None
        self._unset_keepalive_if_required()
        self._unset_timer()
        self._unset_stalled()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(self.timeout_keep_alive, self._check_progress)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unset_stalled()

    def timeout_keep_alive_handler(self) -> None:
        if self.flow.write_paused:  # then _check_progress decides
            self._await_request()
        else:
            self._close_unread()

    def _await_request(self) -> None:
        """Close the connection if no byte arrives within the keep-alive timeout."""
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _set_timer(self, seconds: float, then: Callable[[], object]) -> None:
        self._unset_timer()
        self._timer = self.loop.call_later(seconds, then)

    def _unset_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _unset_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _check_progress(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if unsent == self._unsent:
            self._cut_off()
        else:
            self._unsent = unsent
            self._stalled = self.loop.call_later(self.timeout_keep_alive, self._check_progress)

    def _close_unread(self) -> None:
        """Close, and drop data that the client has not read within its timeout."""
        if self.transport.get_write_buffer_size() > 0:
            self._cut_off()
        else:
            self.transport.close()

    def _cut_off(self) -> None:
        """Abort a connection whose client does not read its response."""
        self._abort()

    def _abort(self) -> None:
        self._gone = True
        self.transport.abort()
