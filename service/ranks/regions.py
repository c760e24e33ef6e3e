"""Memory that the front end shares with every rank, as numbered regions: in the front end, and in a rank."""

import mmap
import os
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from expertd.service.engine.errors import RequestRefusedError
from expertd.service.memory import Mapped, OpenCuda, Register, Span, Unregister
from expertd.service.ranks.messages import Place

_GPU_ADDRESSES = 1 << 60  # from here on: of GPU memory, which the front end does not map
_GPU_ALIGNMENT = 256  # of allocations


@dataclass(frozen=True, slots=True)
class Exported:
    """GPU memory that a caller has exported: a CUDA IPC handle, and the bytes from its start on."""

    handle: bytes
    num_bytes: int


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """Memory that all ranks map; it owns its descriptor if it has one.

    address    where it begins, for the front end; for GPU memory, a made-up address
    of_caller  a caller may take the memory away
    """

    number: int
    memory: Mapped | Exported
    address: int
    of_caller: bool

    def close(self) -> None:
        """Close the descriptor."""
        if isinstance(self.memory, Mapped):
            os.close(self.memory.descriptor)


class SharedRegions:
    """The regions of the front end, by number and by address. Safe from any thread.

    changes  counts whatever changes what `place` says of memory that was placed before
    """

    def __init__(self) -> None:
        self.changes = 0
        self._regions: dict[int, SharedRegion] = {}
        self._by_address: tuple[list[int], list[SharedRegion]] = ([], [])
        self._lost: dict[int, str] = {}  # why a rank could not map a region when ranks started again
        self._last = 0
        self._next_gpu_address = _GPU_ADDRESSES
        self._lock = threading.Lock()

    def add(self, memory: Mapped | Exported, of_caller: bool = False) -> SharedRegion:
        """Number a region, and keep its file open: ranks that start later need it too."""
        with self._lock:
            self._last += 1
            if isinstance(memory, Mapped):
                memory, address = replace(memory, descriptor=os.dup(memory.descriptor)), memory.address
            else:
                address = self._next_gpu_address
                self._next_gpu_address += -(-memory.num_bytes // _GPU_ALIGNMENT) * _GPU_ALIGNMENT
            region = SharedRegion(self._last, memory, address, of_caller)
            self._regions[region.number] = region
            self._sort()
        return region

    def note(self, region: SharedRegion, why_lost: str | None) -> None:
        """Keep why a rank cannot access a region, so that `place` refuses it; None: all ranks can."""
        with self._lock:
            self._lost.pop(region.number, None)
            if why_lost is not None:
                self._lost[region.number] = why_lost
            self.changes += 1

    def remove(self, region: SharedRegion) -> None:
        """Forget a region, in which no request lies any more."""
        with self._lock:
            del self._regions[region.number]
            self._lost.pop(region.number, None)
            self._sort()
            self.changes += 1
        region.close()

    def all(self) -> list[SharedRegion]:
        """The present regions."""
        with self._lock:
            return list(self._regions.values())

    def place(self, address: int, num_bytes: int) -> Place:
        """Where a span lies. Raises ValueError outside all regions, RequestRefusedError in a lost one."""
        starts, regions = self._by_address
        index = bisect_right(starts, address) - 1
        if index >= 0:
            region = regions[index]
            offset = address - region.address
            if offset + num_bytes <= region.memory.num_bytes:
                if (why := self._lost.get(region.number)) is not None:
                    got = f"some that one could not open when it started again ({why}): share it anew"
                    raise RequestRefusedError(f"shared memory: expected memory of all ranks, got {got}")
                return Place(region.number, offset)
        raise ValueError(f"span: expected memory that the ranks share, got {num_bytes} bytes elsewhere")

    def _sort(self) -> None:
        """Replace both lists at once: `place` reads them without the lock."""
        regions = sorted(self._regions.values(), key=lambda region: region.address)
        self._by_address = [region.address for region in regions], regions


class MappedRegions:
    """The regions that a rank has mapped, for its device. Regions come and go on one thread, spans on any.

    when_unmapped  called when one has gone: whoever keeps spans of it has to drop them
    """

    def __init__(self) -> None:
        self.when_unmapped: Callable[[], None] = lambda: None
        self._spans: dict[int, Span] = {}
        self._unregister: dict[int, Unregister] = {}

    def map(
        self,
        number: int,
        descriptor: int,
        num_bytes: int,
        offset: int,
        register: Register,
        of_caller: bool = False,
    ) -> None:
        """Map a part of a file, and close its descriptor. Raises OSError, RuntimeError, ValueError.

        of_caller  only the device may access it: see `SystemMemory`
        """
        try:
            mapped = mmap.mmap(descriptor, num_bytes, offset=offset)
            address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
            self._unregister[number] = register(Mapped(address, num_bytes, descriptor, offset))
        finally:
            os.close(descriptor)
        view = None if of_caller else memoryview(mapped)
        self._spans[number] = Span(address, num_bytes, None, view, mapped)

    def open(self, number: int, memory: Exported, open_cuda: OpenCuda) -> None:
        """Open GPU memory. Raises ValueError."""
        opened = open_cuda(memory.handle, memory.num_bytes)
        self._unregister[number], self._spans[number] = opened.close, opened.span

    def is_on_gpu(self, number: int) -> bool:
        """Whether a region lies in a GPU's memory."""
        return self._spans[number].device is not None

    def unmap(self, number: int) -> None:
        """Forget a region, which no step uses any more; nothing happens if it could not be mapped."""
        if (unregister := self._unregister.pop(number, None)) is not None:
            unregister()
            del self._spans[number]
            self.when_unmapped()

    def span(self, number: int, offset: int, num_bytes: int) -> Span:
        """A part of a region."""
        return self._spans[number].part(offset, num_bytes)
