"""The receiving side of a connection with TLS: the handshake, then decrypted input for a `Connection`.

Not the event loop's own TLS: that one encrypts an answer as a whole before it sends any of it, and does not
tell how much a client has read.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import cast

from expertd.service.http.link import Link
from expertd.service.http.paced_transport import TURN_BYTES
from expertd.service.http.places import shown_peer
from expertd.service.http.refused import RefusedError
from expertd.service.http.shared import ServerState, Shared
from expertd.service.http.timer import Timer
from expertd.service.http.tls_transport import TlsTransport

logger = logging.getLogger(__name__)

_ENDS = (ssl.SSLZeroReturnError, ssl.SSLEOFError, ssl.SSLSyscallError)


class TlsLink(asyncio.BufferedProtocol):
    """Decrypts for the protocol that `make` returns, once the handshake is done."""

    def __init__(
        self,
        shared: Shared,
        state: ServerState,
        context: ssl.SSLContext,
        make: Callable[[], Link],
    ) -> None:
        self._shared = shared
        self._state = state
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._timer = Timer(self._loop)  # for the handshake
        self._incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, outgoing, server_side=True)
        self._outgoing = outgoing
        self._inner: Link | None = None
        self._address: str | None = None  # what has to be given back
        self._is_reading = False
        self._is_at_end = False  # of the input
        self._turn_bytes = 0  # that were read one after another, without a look at other connections
        self._turn: asyncio.Handle | None = None  # of this connection, while others have theirs

    # The server's side, before the connection has one of its own.

    def shutdown(self) -> None:
        """End a handshake: nothing was accepted."""
        self._raw.abort()

    # The callbacks of asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        self._transport = TlsTransport(transport, self._tls, self._outgoing, self._loop, self)
        self._address, refusal = self._shared.places.take(transport.get_extra_info("peername"))
        if refusal is not None:  # without a handshake, which would cost more than an answer
            self._shared.warn(refusal)
            self._shared.count_refusal(refusal.status)
            transport.abort()
            return
        self._state.connections.add(self)
        self._timer.set(self._shared.limits.header_timeout_seconds, self._refuse_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.close()
        self._state.connections.discard(self)
        self._transport.lost()
        if self._turn is not None:
            self._turn.cancel()
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.connection_lost(exc)
        self._shared.places.leave(self._address)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._shared.scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(self._shared.scratch[:nbytes])
        if self._inner is not None or self._shake_hands():
            self.read_on()
        self._turn_bytes += nbytes
        if nbytes < len(self._shared.scratch):  # all that there was
            self._turn_bytes = 0
        elif self._turn_bytes >= TURN_BYTES and not self._raw.is_closing():
            self._turn_bytes = 0
            self._raw.pause_reading()
            self._turn = self._loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        self._turn = None
        if not (self._transport.is_reading_paused or self._raw.is_closing()):
            self._raw.resume_reading()

    def eof_received(self) -> bool:
        self._incoming.write_eof()
        self.read_on()
        return self._inner is not None  # which is closed by the end of its own input

    def pause_writing(self) -> None:
        self._transport.raw_paused()

    def resume_writing(self) -> None:
        self._transport.raw_resumed()

    # Called by the transport; see `TlsOwner`.

    def writing_paused(self) -> None:
        if self._inner is not None:
            self._inner.writing_paused()

    def writing_resumed(self) -> None:
        if self._inner is not None:
            self._inner.writing_resumed()

    def read_on(self) -> None:
        """Hand decrypted input on, until there is none, or reading is paused; after our end, drop it."""
        inner, transport = self._inner, self._transport
        if inner is None or self._is_reading:
            return
        self._is_reading = True
        try:
            while not (self._is_at_end or transport.is_reading_paused or transport.is_closing()):
                if transport.has_ended:  # no more can be decrypted
                    self._incoming.read()
                    if self._incoming.eof:
                        self._end_input(inner)
                    break
                buffer = cast(memoryview, inner.get_buffer(-1))
                count = cast(int, self._tls.read(len(buffer), cast(bytearray, buffer)))
                if count:
                    inner.buffer_updated(count)
                else:
                    self._end_input(inner)
        except ssl.SSLWantReadError:
            transport.flush()
        except _ENDS:
            self._end_input(inner)
        except ssl.SSLError as error:
            logger.debug("TLS input from %s: %s", shown_peer(self._raw.get_extra_info("peername")), error)
            transport.flush()
            transport.abort()
        finally:
            self._is_reading = False

    def _end_input(self, inner: Link) -> None:
        """The client has sent its last byte; a missing close_notify is no matter: lengths tell."""
        self._is_at_end = True
        inner.eof_received()
        self._transport.close()

    # The handshake.

    def _shake_hands(self) -> bool:
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._transport.flush()
            return False
        except ssl.SSLError as error:
            self._refuse(error)
            return False
        self._transport.flush()
        self._timer.close()
        self._state.connections.discard(self)
        self._inner = self._make()
        self._inner.connection_made(self._transport)
        return True

    def _refuse(self, error: ssl.SSLError) -> None:
        logger.debug("TLS handshake with %s: %s", shown_peer(self._raw.get_extra_info("peername")), error)
        self._shared.count_refusal(400)
        self._timer.clear()
        if error.reason == "HTTP_REQUEST":
            refusal = RefusedError(400, "request: expected TLS (https://), got HTTP without it")
            self._raw.write(refusal.response(self._state.default_headers))
        else:
            self._transport.flush()  # the alert that says why
        self._raw.close()

    def _refuse_late(self) -> None:
        self._shared.count_refusal(408)
        self._raw.abort()
