"""A half-closed connection: the client has sent FIN, and either waits for its response or has disconnected.

The two look the same until the server sends something: a client that reads acknowledges it, one that has
disconnected answers with a reset. So while a request is pending, the server sends interim responses, which
every HTTP/1.1 client must skip (RFC 9110, 15.2). After the last response, it waits for the acknowledgement
before it closes the socket.
"""

import asyncio
import socket
import struct
from collections.abc import Callable

_PROBE_SECONDS = 1.0  # most responses are sent sooner, without an interim response
_FIRST_CHECK_SECONDS = 0.001
_LAST_CHECK_SECONDS = 0.5  # after about twice this, the response counts as delivered: the peer may be slow
_UNACKED_OFFSET = 24  # offset of tcpi_unacked in Linux's struct tcp_info
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class HalfClosed:
    """Finds out which of the two it is.

    `may_probe` returns whether an interim response can be sent for the pending request. `abort` is called if
    the client turns out to have disconnected while a request is pending, `finished` at the end, with whether
    it has acknowledged everything.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        may_probe: Callable[[], bool],
        abort: Callable[[], None],
        finished: Callable[[bool], None],
    ) -> None:
        self._finished = finished
        self._reset = False
        self._transport = transport
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._loop = loop
        self._may_probe = may_probe
        self._abort = abort
        self._timer = loop.call_later(_PROBE_SECONDS, self._probe)

    def finish(self) -> None:
        """After the last response: send FIN, and close once the peer acknowledges it or sends a reset."""
        self._timer.cancel()
        self._transport.write_eof()
        self._check_acknowledged(_FIRST_CHECK_SECONDS)

    def stop(self) -> None:
        """Stop probing: the connection is closed."""
        self._timer.cancel()

    def _probe(self) -> None:
        if self._transport.is_closing():
            return
        if self._was_reset():
            self._abort()
            return
        if self._may_probe():
            self._transport.write(_INTERIM)
        self._timer = self._loop.call_later(_PROBE_SECONDS, self._probe)

    def _check_acknowledged(self, pause: float) -> None:
        if self._transport.is_closing():
            return
        unsent = self._transport.get_write_buffer_size() > 0
        if not unsent and (self._was_reset() or not self._unacknowledged() or pause > _LAST_CHECK_SECONDS):
            self._finished(not self._reset)
            self._transport.close()
            return
        self._timer = self._loop.call_later(pause, self._check_acknowledged, pause if unsent else 2 * pause)

    def _was_reset(self) -> bool:
        # Reading SO_ERROR clears it.
        self._reset = self._reset or self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        return self._reset

    def _unacknowledged(self) -> bool:
        if self._socket.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
            return False  # what is written to a Unix socket has arrived
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED_OFFSET + 4)
        (packets,) = struct.unpack_from("I", info, _UNACKED_OFFSET)
        return bool(packets)
