"""Accepts connections on a socket that several processes share, so that each has about as many."""

import asyncio
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

_PATIENCE_SECONDS = 0.01  # for a process with fewer connections to accept one
_RETRY_SECONDS = 0.1  # after an error such as too many open files


class Acceptor:
    """Hands each accepted connection to `accepted`, until `stop`.

    counts  the open connections of each process, shared by all; infinity: it does not run
    index   of this process
    """

    def __init__(
        self,
        listener: socket.socket,
        counts: "memoryview[float]",
        index: int,
        accepted: Callable[[socket.socket], object],
    ) -> None:
        self._listener = listener
        self._counts = counts
        self._index = index
        self._accepted = accepted
        self._loop = asyncio.get_running_loop()
        self._stopped = False

    def start(self) -> None:
        """Accept connections from now on."""
        self._counts[self._index] = 0.0
        self._watch()

    def closed(self) -> None:
        """A connection has been closed."""
        self._counts[self._index] -= 1

    def stop(self) -> None:
        """Accept no more, and close the listener."""
        self._stopped = True
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()

    def _watch(self) -> None:
        if not self._stopped:
            self._loop.add_reader(self._listener.fileno(), self._readable)

    def _readable(self) -> None:
        if self._is_next():
            self._accept()
        else:
            self._pause(_PATIENCE_SECONDS)

    def _is_next(self) -> bool:
        return self._counts[self._index] <= min(self._counts)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(seconds, self._resume, tuple(self._counts))

    def _resume(self, counts: tuple[float, ...]) -> None:
        if self._stopped:
            return
        self._watch()
        # Unchanged counts: nobody else accepts; the others are busy, or hang.
        if self._is_next() or counts == tuple(self._counts):
            self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.error("accepting a connection failed: %s", error)
            self._pause(_RETRY_SECONDS)
            return
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._counts[self._index] += 1
        self._accepted(connection)
