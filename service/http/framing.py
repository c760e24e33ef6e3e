"""Decodes a chunked body (RFC 9112, 7.1), and finds its end exactly: what follows is another request."""

import re
from collections.abc import Callable
from copy import copy

from expertd.service.http.responses import RefusedError

Sink = Callable[[memoryview], object]

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})([ \t]*;[\t\x20-\x7e\x80-\xff]*)?", re.DOTALL)
_TRAILER = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e\x80-\xff]*")
_MAX_SIZE_LINE = 1024
_MAX_LINES = 1000  # about a millisecond


class ChunkedBody:
    """`sink` receives the pieces of the body; None: they are dropped. `announce` receives chunks' sizes."""

    __slots__ = (
        "_in_trailers",
        "_line",
        "_max_trailers",
        "_remaining",
        "_trailer_bytes",
        "announce",
        "done",
        "sink",
    )

    def __init__(self, sink: Sink | None, max_trailers: int) -> None:
        self.sink = sink
        self.announce: Callable[[int], object] | None = None
        self.done = False
        self._max_trailers = max_trailers
        self._line = b""  # the beginning of an incomplete line
        self._remaining = 0  # bytes of the current chunk and of the line end behind it
        self._in_trailers = False
        self._trailer_bytes = 0

    def feed(self, data: bytes, position: int) -> int:
        """Decode `data` from `position` on; returns where the body ends, or the length of `data`.

        It also returns after many lines, because chunks can be tiny, and other connections wait.
        Raises RefusedError (400; 431 for trailers that are too large).
        """
        end = len(data)
        view = memoryview(data)
        lines = _MAX_LINES
        while lines and position < end and not self.done:
            if self._remaining > 2:
                size = min(self._remaining - 2, end - position)
                if self.sink is not None:
                    self.sink(view[position : position + size])
                self._remaining -= size
                position += size
            else:
                position = self._read_line(data, position)
                lines -= 1
        return position

    def _read_line(self, data: bytes, position: int) -> int:
        end = data.find(b"\n", position) + 1 or len(data)
        self._line += data[position:end]
        if self._in_trailers and (size := self._trailer_bytes + len(self._line)) > self._max_trailers:
            text = f"trailers: expected at most {self._max_trailers} bytes, got at least {size}"
            raise RefusedError(431, text)
        if self._remaining and not b"\r\n".startswith(self._line):
            raise _invalid("bytes after a chunk")
        if not self._in_trailers and len(self._line) > _MAX_SIZE_LINE:
            raise _invalid("a chunk size that is too long")
        if not self._line.endswith(b"\n"):
            return end
        line, self._line = self._line, b""
        if not line.endswith(b"\r\n"):
            raise _invalid("a line without CR")
        self._take_line(line[:-2])
        return end

    def _take_line(self, line: bytes) -> None:
        if self._remaining:
            self._remaining = 0
        elif not self._in_trailers:
            size = _SIZE.fullmatch(line)
            if size is None:
                raise _invalid("a chunk size that is no number")
            self._remaining = int(size[1], 16)
            self._in_trailers = not self._remaining
            if self.announce is not None:
                self.announce(self._remaining)
            self._remaining += 2 if self._remaining else 0
        elif not line:
            self.done = True
        elif _TRAILER.fullmatch(line) is None:
            raise _invalid("a trailer that is no header")
        else:
            self._trailer_bytes += len(line) + 2


def _invalid(what: str) -> RefusedError:
    return RefusedError(400, f"request: expected HTTP/1.1, got invalid input: {what}")


class FixedBody:
    """A body of `remaining` bytes, whose pieces `sink` receives; None: they are dropped."""

    __slots__ = ("remaining", "sink")

    def __init__(self, remaining: int, sink: Sink | None) -> None:
        self.remaining = remaining
        self.sink = sink

    @property
    def done(self) -> bool:
        return not self.remaining

    def feed(self, data: bytes, position: int) -> int:
        """As for ChunkedBody; raises nothing."""
        size = min(self.remaining, len(data) - position)
        self.remaining -= size
        if self.sink is not None:
            self.sink(memoryview(data)[position : position + size])
        return position + size


def end_of(body: FixedBody | ChunkedBody, data: bytes, position: int) -> int | None:
    """Where `body` ends in `data`, whose bytes from `position` on it has not been fed; None if not nearby."""
    rest = copy(body)
    rest.sink = None
    if isinstance(rest, ChunkedBody):
        rest.announce = None
    try:
        end = rest.feed(data, position)
    except RefusedError:
        return None
    return end if rest.done else None
