"""Connections that are kept between calls."""

import os
import time

from expertd_client.http.connection import Connection

# Shorter than a server's keep-alive time (75 s), so that it is seldom the server who closes.
MAX_IDLE_SECONDS = 60.0


class Pool:
    """Idle connections to one server, the last used first; may be used by several threads."""

    def __init__(self) -> None:
        self._idle: list[Connection] = []
        self._process = os.getpid()
        self.closed = False

    def take(self) -> Connection | None:
        """A connection that seems alive, or None. (Whether it is, only its use will tell.)"""
        if self._process != os.getpid():
            self._forget()
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.is_alive(MAX_IDLE_SECONDS):
                return connection
            connection.close()
        return None

    def put(self, connection: Connection) -> None:
        """Keep a connection whose last answer has been read."""
        if self.closed or self._process != os.getpid() or connection.start != connection.end:
            connection.close()
            return
        connection.start = connection.end = 0
        connection.idle_since = time.monotonic()
        self._idle.append(connection)

    def close(self) -> None:
        """Close what is idle now, and what is in use when its call ends."""
        self.closed = True
        while self._idle:
            self._idle.pop().close()

    def _forget(self) -> None:
        """After a fork the sockets are the parent's: our copies are closed, its connections stay."""
        inherited, self._idle, self._process = self._idle, [], os.getpid()
        for connection in inherited:
            connection.close()
