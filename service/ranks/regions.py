"""Memory that the front end shares with every rank, as numbered regions: in the front end, and in a rank."""

import mmap
import os
import threading
from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy as np

from expertd.service.memory import Mapped, Register, Span, Unregister
from expertd.service.ranks.messages import Place


@dataclass(frozen=True, slots=True)
class Region:
    """A region of the front end's memory; it owns its descriptor."""

    number: int
    memory: Mapped

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.memory.descriptor)


class SharedRegions:
    """The regions of the front end, by number and by address. Safe from any thread."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        self._by_address: tuple[list[int], list[Region]] = ([], [])
        self._last = 0
        self._lock = threading.Lock()

    def add(self, memory: Mapped) -> Region:
        """Number a region, and keep its file open: ranks that start later need it too."""
        with self._lock:
            self._last += 1
            region = Region(self._last, replace(memory, descriptor=os.dup(memory.descriptor)))
            self._regions[region.number] = region
            self._sort()
        return region

    def remove(self, region: Region) -> None:
        """Forget a region, in which no request lies any more."""
        with self._lock:
            del self._regions[region.number]
            self._sort()
        region.close()

    def all(self) -> list[Region]:
        """The present regions."""
        with self._lock:
            return list(self._regions.values())

    def place(self, address: int, num_bytes: int) -> Place:
        """Where a span lies. Raises ValueError if it is not in a region."""
        starts, regions = self._by_address
        index = bisect_right(starts, address) - 1
        if index >= 0:
            region = regions[index]
            offset = address - region.memory.address
            if offset + num_bytes <= region.memory.num_bytes:
                return Place(region.number, offset)
        raise ValueError(f"span: expected memory that the ranks share, got {num_bytes} bytes elsewhere")

    def _sort(self) -> None:
        """Replace both lists at once: `place` reads them without the lock."""
        regions = sorted(self._regions.values(), key=lambda region: region.memory.address)
        self._by_address = [region.memory.address for region in regions], regions


class MappedRegions:
    """The regions that a rank has mapped, for its device. Regions come and go on one thread, spans on any."""

    def __init__(self) -> None:
        self._spans: dict[int, Span] = {}
        self._unregister: dict[int, Unregister] = {}

    def map(self, number: int, descriptor: int, num_bytes: int, offset: int, register: Register) -> None:
        """Map a part of a file, and close its descriptor. Raises OSError, RuntimeError."""
        try:
            mapped = mmap.mmap(descriptor, num_bytes, offset=offset)
            address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
            self._unregister[number] = register(Mapped(address, num_bytes, descriptor, offset))
        finally:
            os.close(descriptor)
        self._spans[number] = Span(address, num_bytes, None, memoryview(mapped), mapped)

    def unmap(self, number: int) -> None:
        """Forget a region, which no step uses any more; nothing happens if it could not be mapped."""
        if (unregister := self._unregister.pop(number, None)) is not None:
            unregister()
            del self._spans[number]

    def span(self, number: int, offset: int, num_bytes: int) -> Span:
        """A part of a region."""
        return self._spans[number].part(offset, num_bytes)
