"""A connection on which the client has sent its last byte (FIN): it may wait for its answer, or have left.

Both look the same until something is sent: it is acknowledged where a client reads, and answered with a reset
where it has left. So while a request waits, an interim response is sent, which every HTTP/1.1 client has to
skip (RFC 9110, 15.2); and once all is answered, the acknowledgement is awaited before the socket is closed.
"""

import asyncio
import socket
import struct
from collections.abc import Callable

_PROBE_SECONDS = 1.0  # most answers are sent sooner, and no client sees the interim response
_FIRST_LOOK_SECONDS = 0.001
_LAST_LOOK_SECONDS = (
    0.5  # after about twice this the answer counts as delivered: the peer's system may be slow
)
_UNACKED_OFFSET = 24  # of tcpi_unacked in Linux's struct tcp_info
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


class HalfClosed:
    """Learns which of the two it is. `settled` is set at the end, and then `reset` says whether it had left.

    `may_probe` says whether a request waits whose client can be sent an interim response; `abort` is called
    when the client turns out to have left while it does.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        may_probe: Callable[[], bool],
        abort: Callable[[], None],
    ) -> None:
        self.reset = False
        self.settled = asyncio.Event()
        self._transport = transport
        self._socket: socket.socket = transport.get_extra_info("socket")
        self._loop = loop
        self._may_probe = may_probe
        self._abort = abort
        self._timer = loop.call_later(_PROBE_SECONDS, self._probe)

    def settle(self) -> None:
        """After the last answer: send FIN, and close when the client's system has acknowledged or reset."""
        self._timer.cancel()
        self._transport.write_eof()
        self._look(_FIRST_LOOK_SECONDS)

    def stop(self) -> None:
        """The connection is closed, whoever did it."""
        self._timer.cancel()
        self.settled.set()

    def _probe(self) -> None:
        if self._transport.is_closing():
            return
        if self._was_reset():
            self._abort()
            return
        if self._may_probe():
            self._transport.write(_INTERIM)
        self._timer = self._loop.call_later(_PROBE_SECONDS, self._probe)

    def _look(self, pause: float) -> None:
        if self._transport.is_closing():
            return
        unsent = self._transport.get_write_buffer_size() > 0
        if not unsent and (self._was_reset() or not self._unacknowledged() or pause > _LAST_LOOK_SECONDS):
            self.settled.set()
            self._transport.close()
            return
        self._timer = self._loop.call_later(pause, self._look, pause if unsent else 2 * pause)

    def _was_reset(self) -> bool:
        # Reading SO_ERROR clears it.
        self.reset = self.reset or self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        return self.reset

    def _unacknowledged(self) -> bool:
        if not hasattr(socket, "TCP_INFO"):
            return False
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _UNACKED_OFFSET + 4)
        (packets,) = struct.unpack_from("I", info, _UNACKED_OFFSET)
        return bool(packets)
