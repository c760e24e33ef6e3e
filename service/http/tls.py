"""TLS below an `HttpConnection`: the handshake, decrypted input, and answers encrypted as fast as they are
read.

Not the event loop's own TLS (`ssl=`, tried with uvloop 0.23). That one tells of a connection only after its
handshake, so those that are in one cannot be counted (of 64, it told of none); and after one that fails, it
closes without the alert that says why, or the answer to plain HTTP.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from expertd.service.http.connection import HttpConnection
from expertd.service.http.connection_limits import Admission, shown_peer
from expertd.service.http.paced_transport import YIELD_BYTES, PacedTransport
from expertd.service.http.responses import RefusedError
from expertd.service.http.server_context import ServerContext, UvicornState
from expertd.service.http.timer import Timer

logger = logging.getLogger(__name__)

_PIECE_BYTES = 64 * 1024  # encrypted and written at once
_MAX_HELD_BYTES = 1024 * 1024  # by the raw transport; of answers, it holds one piece
_ENDS = (ssl.SSLZeroReturnError, ssl.SSLEOFError, ssl.SSLSyscallError)


class TlsProtocol(asyncio.BufferedProtocol):
    """Decrypts for the protocol that `make` returns, once the handshake is done."""

    def __init__(
        self,
        context: ServerContext,
        state: UvicornState,
        ssl_context: ssl.SSLContext,
        make: Callable[[], HttpConnection],
    ) -> None:
        self._context = context
        self._state = state
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._timer = Timer(self._loop)  # for the handshake
        self._incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = ssl_context.wrap_bio(self._incoming, outgoing, server_side=True)
        self._outgoing = outgoing
        self._inner: HttpConnection | None = None
        self._admission: Admission | None = None
        self._is_reading = False
        self._is_at_end = False  # of the input
        self._bytes_at_once = 0  # that were read one after another, without a look at other connections
        self._yielded: asyncio.Handle | None = None  # goes on after other connections

    # The server's side, before the connection has one of its own.

    def shutdown(self) -> None:
        """End a handshake: nothing was accepted."""
        self._raw.abort()

    # The callbacks of asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._raw = transport
        self._transport = TlsTransport(transport, self._tls, self._outgoing, self._loop, self)
        peer = transport.get_extra_info("peername")
        self._admission = self._context.connection_limits.admit(peer)
        refusal = self._admission.refusal
        if refusal is not None:  # without a handshake, which would cost more than an answer
            self._context.warn(refusal)
            self._context.count_refusal(refusal.status)
            transport.abort()
            return
        self._state.connections.add(self)
        self._timer.set(self._context.limits.header_timeout_seconds, self._refuse_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.close()
        self._state.connections.discard(self)
        self._transport.lost()
        if self._yielded is not None:
            self._yielded.cancel()
        inner, self._inner = self._inner, None
        if inner is not None:
            inner.connection_lost(exc)
        if self._admission is not None:
            self._admission.release()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._context.scratch

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(self._context.scratch[:nbytes])
        if self._inner is not None or self._shake_hands():
            self.read_on()
        self._bytes_at_once += nbytes
        if nbytes < len(self._context.scratch):  # all that there was
            self._bytes_at_once = 0
        elif self._bytes_at_once >= YIELD_BYTES and not self._raw.is_closing():
            self._bytes_at_once = 0
            self._raw.pause_reading()
            self._yielded = self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._yielded = None
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

    # Called by the transport; see `TransportOwner`.

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
                buffer = inner.get_buffer(-1)
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

    def _end_input(self, inner: HttpConnection) -> None:
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
        self._context.count_refusal(400)
        self._timer.clear()
        if error.reason == "HTTP_REQUEST":
            refusal = RefusedError(400, "request: expected TLS (https://), got HTTP without it")
            self._raw.write(refusal.response(self._state.default_headers))
        else:
            self._transport.flush()  # the alert that says why
        self._raw.close()

    def _refuse_late(self) -> None:
        self._context.count_refusal(408)
        self._raw.abort()


class TlsTransport(PacedTransport):
    """Encrypts what is written as fast as the client reads, so an answer is never there twice."""

    pieces_at_once = YIELD_BYTES // _PIECE_BYTES

    def __init__(
        self,
        raw: asyncio.Transport,
        tls: ssl.SSLObject,
        outgoing: ssl.MemoryBIO,
        loop: asyncio.AbstractEventLoop,
        owner: TlsProtocol,
    ) -> None:
        super().__init__(raw, loop, owner)
        self._tls = tls
        self._outgoing = outgoing
        self._input = owner

    def flush(self) -> None:
        """Send what TLS itself has to say, too, unless a client asks for that without reading it."""
        if self._outgoing.pending and not self._raw.is_closing():
            self._raw.write(self._outgoing.read())
            if self._raw.get_write_buffer_size() > _MAX_HELD_BYTES:
                self.abort()

    def resume_reading(self) -> None:
        if self.is_reading_paused:
            super().resume_reading()
            self._loop.call_soon(self._input.read_on)  # what is decrypted already

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls if name == "ssl_object" else super().get_extra_info(name, default)

    def _send(self) -> None:
        try:
            super()._send()
        except ssl.SSLError:  # after an alert of the client, nothing can be sent
            self.abort()

    def _write_piece(self) -> None:
        while self._unsent and self._outgoing.pending < _PIECE_BYTES:
            view = self._unsent[0]
            self._take(view, self._tls.write(view[:_PIECE_BYTES]))
        self.flush()

    def _write_end(self) -> None:
        with suppress(ssl.SSLError):  # no close_notify from the client yet, or a failed connection
            self._tls.unwrap()
        self.flush()
        super()._write_end()
