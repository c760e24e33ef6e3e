"""One connection: a socket that never blocks, and what has been received on it but not been read."""

import math
import os
import select
import socket
import ssl
import time
import weakref
from contextlib import suppress

from expertd_client.deadline import Deadline

_RECORD_BYTES = 16 * 1024  # of TLS


class Connection:
    """Used by one call at a time, whose `deadline` it has. Bytes `start` to `end` of `buffer` are unread."""

    __slots__ = (
        "_poll", "_polled", "_tls", "buffer", "deadline", "end", "idle_since", "sock", "start",
        "view",
    )  # fmt: skip

    BUFFER_BYTES = 64 * 1024

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.buffer = bytearray(self.BUFFER_BYTES)
        self.view = memoryview(self.buffer)
        self.start = self.end = 0
        self.deadline = Deadline(math.inf)
        self.idle_since = 0.0
        self._poll = select.poll()
        self._polled = select.POLLIN
        self._poll.register(sock, self._polled)
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None

    def poll(self, events: int, milliseconds: float) -> int:
        """Wait in this thread: which of `events` hold; an end or an error can be read. 0: time is over."""
        if events != self._polled:
            self._poll.modify(self.sock, events)
            self._polled = events
        found = self._poll.poll(milliseconds)
        if not found:
            return 0
        return found[0][1] & events or select.POLLIN

    def is_alive(self, max_idle_seconds: float) -> bool:
        """Whether an idle connection may be used: not idle for long, and nothing came, not even an end."""
        return time.monotonic() - self.idle_since < max_idle_seconds and not self.poll(select.POLLIN, 0)

    def send(self, parts: list[memoryview]) -> int:
        """Send some of `parts`. Raises BlockingIOError; then the same ones are to be sent again."""
        if self._tls is None:
            return self.sock.sendmsg(parts)
        # Small parts as one record, and one packet; else a head and its tensors would be two.
        few = sum(map(len, parts)) <= _RECORD_BYTES
        try:
            return self._tls.send(b"".join(parts) if few else parts[0])
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def receive(self, into: memoryview) -> int:
        """Receive some bytes; 0 at the end. Raises BlockingIOError."""
        try:
            return self.sock.recv_into(into)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
            raise BlockingIOError from error

    def has_answer(self) -> bool:
        """Whether what has come is an answer, or an end: TLS has messages of its own."""
        if self._tls is None:
            return True
        room = self.make_room()
        try:
            self.end += self.receive(room)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def make_room(self) -> memoryview:
        """Where to receive more, after what is not yet read; empty if the buffer is full."""
        if self.start:
            unread = self.end - self.start
            self.buffer[:unread] = self.buffer[self.start : self.end]
            self.start, self.end = 0, unread
        return self.view[self.end :]

    def take(self, into: memoryview) -> int:
        """Move what is not yet read to `into`, as far as it fits; the number of bytes."""
        count = min(len(into), self.end - self.start)
        into[:count] = self.view[self.start : self.start + count]
        self.start += count
        return count

    def break_off(self) -> None:
        """End it, from any thread: who waits for it sees the end."""
        with suppress(OSError):  # it is closed already
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def open_socket(family: int) -> socket.socket:
    """A new one, which a forked child closes: else a server would not hear that the parent has closed it."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    _sockets.add(sock)
    return sock


def with_tls(sock: socket.socket, context: ssl.SSLContext, host: str) -> ssl.SSLSocket:
    """A connected socket of `open_socket` with TLS, before the handshake."""
    secure = context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    _sockets.add(secure)
    return secure


_sockets: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    for sock in list(_sockets):
        sock.close()


os.register_at_fork(after_in_child=_close_in_child)
