"""Blocks of one piece of host memory that is registered with the device once, when the server starts."""

import mmap
import os
import threading

import numpy as np

from expertd.service.memory.span import Mapped, Register, Span, Unregister, nothing_to_register

_GRAIN = 64 * 1024  # blocks start and end at multiples of it: few sizes, so that freed blocks fit again


class Block:
    """Memory of one body or output, in use until `release`."""

    __slots__ = ("_arena", "_start", "span")

    def __init__(self, arena: "Arena", start: int, span: Span) -> None:
        self._arena: Arena | None = arena
        self._start = start
        self.span = span

    @property
    def view(self) -> memoryview:
        """The block's bytes, writable."""
        assert self.span.view is not None
        return self.span.view

    def extend(self, num_bytes: int) -> bool:
        """Make the block longer, where it is: `num_bytes`. False if the memory behind it is in use."""
        assert self._arena is not None
        longer = self._arena._extended(self._start, self.span.num_bytes, num_bytes)
        self.span = longer or self.span
        return longer is not None

    def release(self) -> None:
        """Give the memory back; later calls do nothing. Nobody may use the block's views afterwards."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena._free_block(self._start, self.span.num_bytes)


class Arena:
    """At most `num_bytes` of memory for bodies and outputs, as blocks. Safe from any thread.

    memory  where they are; None: in a file without a name, whose pages the kernel allocates on first use.
            `register` may touch all of them; without it, `give_back` frees those that are not needed
    used    one cell for `used_bytes`, which other processes may read; None: one of its own
    """

    def __init__(
        self,
        num_bytes: int,
        register: Register = nothing_to_register,
        memory: memoryview | None = None,
        used: "memoryview[float] | None" = None,
    ) -> None:
        self.num_bytes = _rounded(num_bytes) if memory is None else len(memory) // _GRAIN * _GRAIN
        self.fd = -1
        self._mapping: mmap.mmap | None = None  # of pages that may be freed
        self._unregister: Unregister = lambda: None
        if memory is None:
            self.fd = os.memfd_create("expertd-arena")
            try:
                os.ftruncate(self.fd, self.num_bytes)
                mapping = mmap.mmap(self.fd, self.num_bytes)
                self._unregister = register(Mapped(_address_of(mapping), self.num_bytes, self.fd))
            except BaseException:
                os.close(self.fd)
                raise
            self._mapping = mapping if register is nothing_to_register else None
            memory = memoryview(mapping)
        self._view = memory
        self._address = _address_of(memory)
        self._free = {0: self.num_bytes}  # start -> bytes, in the order of addresses
        self._lock = threading.Lock()
        self._used = [0.0] if used is None else used
        self._used[0] = 0.0
        # Blocks are taken from the beginning on: what lies behind all that was used lately is spare.
        self._touched_end = 0  # of the pages that may exist
        self._period_end = 0  # of the blocks in use since `begin_period`
        self._spare_from = self.num_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks in use."""
        return int(self._used[0])

    def take(self, num_bytes: int) -> Block | None:
        """A block of `num_bytes`, at least 1; None if the arena has no piece of that size left."""
        size = _rounded(num_bytes)
        with self._lock:
            start = next((start for start, free in self._free.items() if free >= size), None)
            if start is None:
                return None
            self._use(start, size)
        return Block(self, start, self._span(start, num_bytes))

    def begin_period(self) -> None:
        """Let `give_back` free what was not in use since the last call of this."""
        with self._lock:
            self._spare_from, self._period_end = self._period_end, self._used_end()

    def give_back(self, num_bytes: int) -> int:
        """Free up to `num_bytes` of spare memory; returns how many. Takes about 0.1 ms for each MiB."""
        with self._lock:
            end = self._touched_end
            start = max(self._spare_from, self._period_end, end - num_bytes)
            if self._mapping is None or start >= end:
                return 0
            self._mapping.madvise(mmap.MADV_REMOVE, start, end - start)
            self._touched_end = start
            return end - start

    def close(self) -> None:
        """Unregister the memory. It is unmapped once nothing refers to it."""
        self._unregister()
        if self.fd >= 0:
            os.close(self.fd)

    def _extended(self, start: int, old_bytes: int, num_bytes: int) -> Span | None:
        end = start + _rounded(old_bytes)
        more = start + _rounded(num_bytes) - end
        with self._lock:
            if more > 0:
                if self._free.get(end, 0) < more:
                    return None
                self._use(end, more)
        return self._span(start, num_bytes)

    def _span(self, start: int, num_bytes: int) -> Span:
        return Span(self._address + start, num_bytes, None, self._view[start : start + num_bytes], self)

    def _use(self, start: int, size: int) -> None:
        """Take `size` bytes of the free piece at `start`. The caller holds the lock."""
        free = self._free.pop(start)
        if free > size:
            self._free[start + size] = free - size
            self._free = dict(sorted(self._free.items()))
        self._used[0] += size
        self._period_end = max(self._period_end, start + size)
        self._touched_end = max(self._touched_end, start + size)

    def _used_end(self) -> int:
        """Where the last block in use ends."""
        start, free = next(reversed(self._free.items()), (self.num_bytes, 0))
        return start if start + free == self.num_bytes else self.num_bytes

    def _free_block(self, start: int, num_bytes: int) -> None:
        size = _rounded(num_bytes)
        with self._lock:
            self._used[0] -= size
            self._free[start] = size
            merged: dict[int, int] = {}
            last = -1
            for begin, free in sorted(self._free.items()):
                if last >= 0 and last + merged[last] == begin:
                    merged[last] += free
                else:
                    merged[begin] = free
                    last = begin
            self._free = merged


def _address_of(memory: mmap.mmap | memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _rounded(num_bytes: int) -> int:
    return max(1, -(-num_bytes // _GRAIN)) * _GRAIN
