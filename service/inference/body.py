"""The body of an infer request as it arrives: bytes if it is small, else a block that the device reads."""

import time
from dataclasses import dataclass, field

from expertd.service.inference.errors import memory_full
from expertd.service.inference.limits import BodyLimit
from expertd.service.memory import Arena, Block, Buffer, Span

LARGE_BYTES = 64 * 1024  # from this size on, bodies and outputs lie in the arena
ALIGNMENT = 256  # of the first byte behind the JSON: devices read aligned tensors faster


@dataclass(slots=True)
class Received:
    """A whole body, and the memory that it lies in, if it is not bytes.

    at            when it was complete, by time.perf_counter
    call_seconds  what the call's own deadline left then; None: it has none
    """

    content: Buffer | Span
    body: "InferBody | None" = None
    at: float = field(default_factory=time.perf_counter)
    call_seconds: float | None = None

    def release(self) -> None:
        """Give the memory back."""
        if self.body is not None:
            self.body.release()


class InferBody:
    """Receives a body within `limit`, by `write`, or by the socket at `rest`.

    arena          where large bodies go; None: nowhere, all are bytes
    length         bytes of the whole body, if known
    header_length  bytes of its JSON, if known
    """

    __slots__ = ("_arena", "_length", "_limit", "_size", "_small", "_start", "block")

    def __init__(
        self, arena: Arena | None, limit: BodyLimit, length: int | None, header_length: int | None
    ) -> None:
        self._arena = arena
        self._limit = limit
        self._length = length
        self._start = -(header_length or 0) % ALIGNMENT
        self._size = 0
        self._small = bytearray()
        self.block: Block | None = None
        if length is not None and length >= LARGE_BYTES:
            self._move(length)

    def expect(self, num_bytes: int) -> None:
        """Raise RequestError if this many more bytes exceed the limit."""
        self._limit.check(self._size + num_bytes)

    def write(self, piece: memoryview) -> None:
        """Append `piece`. Raises RequestError, also if the arena is full."""
        size = self._size + len(piece)
        self.expect(len(piece))
        if self.block is None:
            if size < LARGE_BYTES or self._arena is None:
                self._small += piece
                self._size = size
                return
            self._move(2 * size)
        elif self._start + size > len(self.block.view):
            self._move(2 * size)
        assert self.block is not None
        self.block.view[self._start + self._size : self._start + size] = piece
        self._size = size

    @property
    def rest(self) -> memoryview | None:
        """Where the bytes that are still missing belong; None if the body is small, or its length unknown."""
        if self.block is None or self._length is None:
            return None
        return self.block.view[self._start + self._size : self._start + self._length]

    def advance(self, num_bytes: int) -> None:
        """Count bytes that were written to `rest`."""
        self._size += num_bytes

    def content(self) -> Buffer | Span:
        """The whole body: bytes, or a span of the block."""
        if self.block is None:
            return bytes(self._small)
        return self.block.span.part(self._start, self._size)

    def release(self) -> None:
        """Give the block back."""
        if self.block is not None:
            self.block.release()
            self.block = None

    def _move(self, size: int) -> None:
        """Continue in a block for `size` bytes."""
        if self._arena is None:
            return
        needed = self._start + min(size, self._limit.num_bytes)
        if self.block is not None and self.block.extend(needed):
            return
        block = take(self._arena, needed)
        end = self._start + self._size
        if self.block is None:
            block.view[self._start : end] = self._small
            self._small = bytearray()
        else:
            block.view[self._start : end] = self.block.view[self._start : end]
            self.block.release()
        self.block = block


def take(arena: Arena, num_bytes: int) -> Block:
    """A block of `num_bytes`. Raises RequestError if the arena has none."""
    block = arena.take(num_bytes)
    if block is None:
        raise memory_full()
    return block
