"""Named regions of callers' memory: one namespace, bounds, and counts of the requests that use each."""

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from expertd.service.memory.span import DeviceMemory, Span
from expertd.service.memory.system import RegionError, SystemMemory

_MAX_NAME = 256

RegionKind = Literal["system", "cuda"]


@dataclass(slots=True, eq=False)
class Region:
    """Memory registered under a name; `details` are what its caller said of it, besides the size."""

    name: str
    kind: RegionKind
    num_bytes: int
    memory: SystemMemory | DeviceMemory
    details: Mapping[str, str | int]
    uses: int = 0
    last_used: float = field(default_factory=time.monotonic)
    on_idle: Callable[[], object] | None = None  # set once the region is removed

    def place(self, offset: int) -> tuple[Hashable, int]:
        """The memory behind the region, and the position of `offset` in it: two regions may share it."""
        if isinstance(self.memory, SystemMemory):
            return self.memory.identity, self.memory.start + offset
        if self.memory.identity is not None:
            return self.memory.identity, offset
        return self.kind, self.memory.span.address + offset

    def span(self, offset: int, num_bytes: int) -> Span | None:
        """The part that the device accesses in place; None: the CPU copies. Raises RegionError."""
        if isinstance(self.memory, DeviceMemory):
            return self.memory.span.part(offset, num_bytes)
        return self.memory.span(offset, num_bytes) if self.memory.in_place else None

    def is_abandoned(self, idle_seconds: float) -> bool:
        """Whether it is unused, and its caller seems to be gone: the file has no name, or time has passed."""
        if self.uses:
            return False
        if isinstance(self.memory, SystemMemory) and self.memory.is_unlinked():
            return True
        return time.monotonic() - self.last_used > idle_seconds


class Regions:
    """The registered regions: at most `max_regions`, of `max_bytes` together. Safe from any thread.

    A region that is removed is no longer found, but counts until `forget`, because its memory is still held.
    """

    def __init__(self, max_regions: int, max_bytes: int) -> None:
        self._max_regions = max_regions
        self._max_bytes = max_bytes
        self._named: dict[str, Region] = {}
        self._held: dict[str | Region, int] = {}  # bytes of regions, and of names that are being registered
        self._lock = threading.Lock()

    def reserve(self, name: str, num_bytes: int) -> None:
        """Reserve a name and its bytes, until `add` or `forget(name)`. Raises RegionError."""
        if len(name) > _MAX_NAME:
            raise RegionError(f"name: expected at most {_MAX_NAME} characters, got {len(name)}")
        with self._lock:
            if name in self._named or name in self._held:
                raise RegionError(f"name: expected one that is not registered yet, got {name!a:.80}")
            if len(self._held) >= self._max_regions:
                limit = f"shared_memory.max_regions ({self._max_regions})"
                raise RegionError(f"region: expected at most {limit} regions, got one more")
            if (total := sum(self._held.values()) + num_bytes) > self._max_bytes:
                limit = f"shared_memory.max_bytes ({self._max_bytes})"
                raise RegionError(f"byte_size: expected at most {limit} in all regions, got {total}")
            self._held[name] = num_bytes

    def add(self, region: Region) -> None:
        """Make a region with a reserved name available."""
        with self._lock:
            self._held[region] = self._held.pop(region.name)
            self._named[region.name] = region

    def forget(self, held: str | Region) -> None:
        """End a reservation, or count a removed region no longer: its memory is freed."""
        with self._lock:
            del self._held[held]

    def of_kind(self, kind: RegionKind) -> list[Region]:
        """All regions of a kind, in the order of their registration."""
        with self._lock:
            return [region for region in self._named.values() if region.kind == kind]

    def remove(self, region: Region, on_idle: Callable[[], object]) -> None:
        """Remove a region; `on_idle` is called once no request uses it, on any thread."""
        with self._lock:
            del self._named[region.name]
            region.on_idle = on_idle
            idle = region.uses == 0
        if idle:
            on_idle()

    def use(self, name: str) -> Region:
        """The region `name`, in use until `release`. Raises RegionError."""
        with self._lock:
            region = self._named.get(name)
            if region is None:
                raise RegionError(f"expected a registered region, got {name!a:.80}")
            region.uses += 1
            return region

    def release(self, region: Region) -> None:
        """End one use of a region."""
        with self._lock:
            region.uses -= 1
            region.last_used = time.monotonic()
            on_idle = region.on_idle if region.uses == 0 else None
        if on_idle is not None:
            on_idle()

    def totals(self, kind: RegionKind) -> tuple[int, int]:
        """The number of regions of a kind that are held, and their bytes."""
        with self._lock:
            sizes = [
                size for held, size in self._held.items() if isinstance(held, Region) and held.kind == kind
            ]
        return len(sizes), sum(sizes)
