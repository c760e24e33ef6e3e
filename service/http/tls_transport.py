"""The sending side of a connection with TLS."""

import asyncio
import ssl
from contextlib import suppress
from typing import Any, Protocol

from expertd.service.http.paced_transport import TURN_BYTES, Owner, PacedTransport

_PIECE_BYTES = 64 * 1024  # encrypted and written at once
_MAX_HELD_BYTES = 1024 * 1024  # by the raw transport; of answers, it holds one piece


class TlsOwner(Owner, Protocol):
    """Also holds decrypted input that it has not passed on yet."""

    def read_on(self) -> None:
        """Reading is resumed."""


class TlsTransport(PacedTransport):
    """Encrypts what is written as fast as the client reads, so an answer is never there twice."""

    turn_pieces = TURN_BYTES // _PIECE_BYTES

    def __init__(
        self,
        raw: asyncio.Transport,
        tls: ssl.SSLObject,
        outgoing: ssl.MemoryBIO,
        loop: asyncio.AbstractEventLoop,
        owner: TlsOwner,
    ) -> None:
        super().__init__(raw, loop, owner)
        self.is_reading_paused = False
        self._tls = tls
        self._outgoing = outgoing
        self._input = owner

    def flush(self) -> None:
        """Send what TLS itself has to say, too, unless a client asks for that without reading it."""
        if self._outgoing.pending and not self._raw.is_closing():
            self._raw.write(self._outgoing.read())
            if self._raw.get_write_buffer_size() > _MAX_HELD_BYTES:
                self.abort()

    def pause_reading(self) -> None:
        self.is_reading_paused = True
        super().pause_reading()

    def resume_reading(self) -> None:
        self.is_reading_paused = False
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
