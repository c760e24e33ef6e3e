"""The sending side of a connection with TLS: what a `Connection` takes for its socket's transport."""

import asyncio
import ssl
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

_PIECE_BYTES = 64 * 1024  # encrypted and written at once
_MAX_HELD_BYTES = 1024 * 1024  # by the raw transport; of answers, it holds one piece
_TURN_PIECES = 16  # before other connections have their turn


class Reader(Protocol):
    """What a transport tells its receiving side."""

    def writing_paused(self) -> None:
        """Bytes that were written are held."""

    def writing_resumed(self) -> None:
        """None are held any more."""

    def read_on(self) -> None:
        """Reading is resumed."""


class TlsTransport(asyncio.Transport):
    """Encrypts what is written as fast as the client reads, so an answer is never there twice.

    What was written is kept, not copied, until it is encrypted. `reader` learns when bytes are held back, as
    with a high-water mark of 0.
    """

    def __init__(
        self,
        raw: asyncio.Transport,
        tls: ssl.SSLObject,
        outgoing: ssl.MemoryBIO,
        loop: asyncio.AbstractEventLoop,
        reader: Reader,
    ) -> None:
        super().__init__()
        self.is_reading_paused = False
        self._raw = raw
        self._tls = tls
        self._outgoing = outgoing
        self._loop = loop
        self._reader = reader
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._is_full = False  # the raw transport holds bytes
        self._holds_bytes = False  # as the reader was told
        self._is_closing = False
        self._ends = False  # with close_notify, once all is sent
        self._has_ended = False
        self._turn: asyncio.Handle | None = None

    # Of the raw transport.

    def raw_paused(self) -> None:
        """The raw transport holds bytes."""
        self._is_full = True
        self._tell()

    def raw_resumed(self) -> None:
        """The raw transport has sent everything."""
        self._is_full = False
        self._send()

    def flush(self) -> None:
        """Send what TLS itself has to say, too, unless a client asks for that without reading it."""
        if self._outgoing.pending and not self._raw.is_closing():
            self._raw.write(self._outgoing.read())
            if self._raw.get_write_buffer_size() > _MAX_HELD_BYTES:
                self.abort()

    def lost(self) -> None:
        """The connection is closed: let go of everything."""
        self._is_closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._turn is not None:
            self._turn.cancel()

    # Of asyncio.Transport.

    def write(self, data: Any) -> None:
        if self._ends or self._raw.is_closing():
            return
        view = memoryview(data).cast("B")
        if len(view):
            self._unsent.append(view)
            self._unsent_bytes += len(view)
            if self._turn is None:
                self._send()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes + self._raw.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        self.is_reading_paused = True
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self.is_reading_paused = False
        self._raw.resume_reading()
        self._loop.call_soon(self._reader.read_on)  # what is decrypted already

    def write_eof(self) -> None:
        self._ends = True
        self._end()

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self._is_closing or self._raw.is_closing()

    def close(self) -> None:
        self._is_closing = self._ends = True
        self._end()

    def abort(self) -> None:
        self.lost()
        self._raw.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls if name == "ssl_object" else self._raw.get_extra_info(name, default)

    def _send(self) -> None:
        """Encrypt and write, as long as the raw transport holds nothing."""
        pieces = _TURN_PIECES
        try:
            while self._unsent and not self._is_full and pieces:
                self._encrypt()
                self.flush()
                pieces -= 1
        except ssl.SSLError:  # after an alert of the client, nothing can be sent
            self.abort()
            return
        if self._unsent and not self._is_full:
            self._turn = self._loop.call_soon(self._take_turn)
        self._tell()
        self._end()

    def _take_turn(self) -> None:
        self._turn = None
        self._send()

    def _encrypt(self) -> None:
        while self._unsent and self._outgoing.pending < _PIECE_BYTES:
            view = self._unsent[0]
            count = self._tls.write(view[:_PIECE_BYTES])
            self._unsent_bytes -= count
            if count == len(view):
                self._unsent.popleft()
            else:
                self._unsent[0] = view[count:]

    def _tell(self) -> None:
        holds = self._is_full or bool(self._unsent)
        if holds is self._holds_bytes or self._raw.is_closing():
            return
        self._holds_bytes = holds
        if holds:
            self._reader.writing_paused()
        else:
            self._reader.writing_resumed()

    def _end(self) -> None:
        if not self._ends or self._unsent or self._raw.is_closing():
            return
        if not self._has_ended:
            self._has_ended = True
            with suppress(ssl.SSLError):  # no close_notify from the client yet, or a failed connection
                self._tls.unwrap()
            self.flush()
            if not self._is_closing:
                self._raw.write_eof()
        if self._is_closing:
            self._raw.close()
