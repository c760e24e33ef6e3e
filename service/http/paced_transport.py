"""The transport that a `Connection` writes to: it passes large answers to the socket a piece at a time.

The event loop's own transport would copy megabytes to the socket in one go, while every other connection
waits.
"""

import asyncio
from abc import abstractmethod
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

YIELD_BYTES = 512 * 1024
"""How much of a body a connection reads or writes before other connections go on."""
_PIECE_BYTES = 256 * 1024  # per write to the raw transport


class TransportOwner(Protocol):
    """What a transport tells the connection whose answers it writes."""

    def writing_paused(self) -> None:
        """Bytes that were written are held."""

    def writing_resumed(self) -> None:
        """Everything that was written has been passed on."""


class PacedTransport(asyncio.Transport):
    """Writes as fast as the client reads, a piece at a time; what was written is kept, not copied.

    `owner` learns when bytes are held back, as with a high-water mark of 0.
    """

    pieces_at_once = YIELD_BYTES // _PIECE_BYTES

    def __init__(
        self, raw: asyncio.Transport, loop: asyncio.AbstractEventLoop, owner: TransportOwner
    ) -> None:
        super().__init__()
        self._raw = raw
        self._loop = loop
        self._owner = owner
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._is_full = False  # the raw transport holds bytes
        self._holds_bytes = False  # as the owner was told
        self._is_closing = False
        self._ends = False  # close or EOF was requested
        self.has_ended = False  # EOF was sent, if it was wanted
        self.is_reading_paused = False
        self._yielded: asyncio.Handle | None = None  # goes on after other connections

    # Of the subclass.

    @abstractmethod
    def _write_piece(self) -> None:
        """Give the raw transport a piece of what is unsent."""

    def _write_end(self) -> None:
        """Everything is sent, and nothing will follow."""
        if not self._is_closing:
            with suppress(OSError):  # the client has left: asyncio's own loop raises
                self._raw.write_eof()

    # Of the raw transport.

    def raw_paused(self) -> None:
        """The raw transport holds bytes."""
        self._is_full = True
        self._tell()

    def raw_resumed(self) -> None:
        """The raw transport has sent everything."""
        self._is_full = False
        if self._yielded is None:  # not at once: asyncio's own transport must not be closed in this callback
            self._yielded = self._loop.call_soon(self._go_on)

    def lost(self) -> None:
        """The connection is closed: let go of everything."""
        self._is_closing = True
        self._unsent.clear()
        self._unsent_bytes = 0
        if self._yielded is not None:
            self._yielded.cancel()

    # Of asyncio.Transport.

    def write(self, data: Any) -> None:
        if self._ends or self._raw.is_closing():
            return
        view = memoryview(data).cast("B")
        if len(view):
            self._unsent.append(view)
            self._unsent_bytes += len(view)
            if self._yielded is None:
                self._send()

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes + self._raw.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def pause_reading(self) -> None:
        if not (self.is_reading_paused or self._raw.is_closing()):
            self.is_reading_paused = True
            self._raw.pause_reading()

    def resume_reading(self) -> None:
        if self.is_reading_paused and not self._raw.is_closing():
            self.is_reading_paused = False
            self._raw.resume_reading()

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
        return self._raw.get_extra_info(name, default)

    def _send(self) -> None:
        """Write, as long as the raw transport holds nothing."""
        pieces = self.pieces_at_once
        while self._unsent and not self._is_full and pieces:
            self._write_piece()
            pieces -= 1
        if self._unsent and not self._is_full:
            self._yielded = self._loop.call_soon(self._go_on)
        self._tell()
        self._end()

    def _go_on(self) -> None:
        self._yielded = None
        self._send()

    def _take(self, view: memoryview, count: int) -> None:
        """The first bytes of `view`, the first that is unsent, are sent."""
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
            self._owner.writing_paused()
        else:
            self._owner.writing_resumed()

    def _end(self) -> None:
        if not self._ends or self._unsent or self._raw.is_closing():
            return
        if not self.has_ended:
            self.has_ended = True
            self._write_end()
        if self._is_closing:
            self._raw.close()


class PlainTransport(PacedTransport):
    """Without TLS."""

    def write(self, data: Any) -> None:
        if self._unsent or self._ends or len(data) > _PIECE_BYTES:
            super().write(data)
        else:
            self._raw.write(data)

    def _write_piece(self) -> None:
        view = self._unsent[0]
        piece = view[:_PIECE_BYTES]
        self._take(view, len(piece))
        self._raw.write(piece)
