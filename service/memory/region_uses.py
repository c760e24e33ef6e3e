"""The regions that one request names for its tensors."""

from collections.abc import Callable
from dataclasses import dataclass

from expertd.service.memory.arena import Block
from expertd.service.memory.regions import Region, Regions
from expertd.service.memory.span import Buffer, Span, Write, host_view
from expertd.service.memory.system import RegionError, SystemMemory

TakeBlock = Callable[[int], Block | None]

_SMALL_BYTES = 64 * 1024  # copies of at most this size need no block


class NoBlockError(Exception):
    """The arena has no block of that size left."""


@dataclass(frozen=True, slots=True)
class RegionSlice:
    """`num_bytes` at `offset` of the region `name`, for the tensor that errors call `what`."""

    what: str
    name: str
    offset: int
    num_bytes: int


class RegionUses:
    """Holds the regions of one request until `release`.

    Where the device accesses memory in place, a tensor is a span. Else it is copied: `load` fills the inputs,
    `store` writes the output. Both may run in any thread, and raise RegionError if a file was shrunk.
    """

    def __init__(self, regions: Regions, take: TakeBlock) -> None:
        self._regions = regions
        self._take = take
        self._held: list[Region] = []
        self._blocks: list[Block] = []
        self._copies: list[tuple[RegionSlice, SystemMemory, memoryview]] = []
        self._stored: tuple[RegionSlice, Write, int] | None = None
        self._inputs: list[tuple[RegionSlice, Region]] = []
        self.output_place: RegionSlice | None = None

    @property
    def load_bytes(self) -> int:
        """The bytes that `load` copies."""
        return sum(len(target) for _, _, target in self._copies)

    @property
    def store_bytes(self) -> int:
        """The bytes that `store` copies."""
        return 0 if self._stored is None else self._stored[2]

    def input(self, place: RegionSlice, alignment: int, copied: bool) -> Buffer | Span:
        """The tensor at `place`: a span, or memory that `load` fills.

        copied  whether the host must see it: then host memory is copied even where the device could read it
        Raises RegionError, and NoBlockError if there is no memory for a copy.
        """
        region = self._use(place, alignment)
        self._inputs.append((place, region))
        span = None
        if not (copied and isinstance(region.memory, SystemMemory)):
            span = region.span(place.offset, place.num_bytes)
        if span is not None:
            return span
        assert isinstance(region.memory, SystemMemory)
        target = self._memory(place.num_bytes)
        self._copies.append((place, region.memory, target))
        return target

    def output(self, place: RegionSlice, alignment: int, needed: int, later: bool = False) -> Span | None:
        """Where the device writes `needed` bytes; None: `store` writes them. Raises RegionError.

        later  `store` writes them if it can, even where the device could
        """
        region = self._use(place, alignment)
        if needed > place.num_bytes:
            raise RegionError(f"expected shared_memory_byte_size of at least {needed}, got {place.num_bytes}")
        memory, start = region.place(place.offset)
        for other, other_region in self._inputs:
            other_memory, other_start = other_region.place(other.offset)
            if (
                memory == other_memory
                and start < other_start + other.num_bytes
                and other_start < start + needed
            ):
                raise RegionError(f"expected memory apart from the inputs, got an overlap with {other.what}")
        self.output_place = place
        span = region.span(place.offset, needed)
        if region.memory.write is None or not (later or span is None):
            return span
        self._stored = place, region.memory.write, needed
        return None

    def load(self) -> None:
        """Copy the inputs that are not read in place."""
        for place, memory, target in self._copies:
            try:
                memory.read_into(place.offset, target)
            except RegionError as error:
                raise RegionError(f"{place.what}: {error}") from error

    def store(self, output: Buffer | Span) -> None:
        """Copy a step's output to its place, unless the device has written it there, or it has none."""
        if self._stored is None:
            return
        place, write, _ = self._stored
        try:
            write(place.offset, host_view(output).cast("B"))
        except RegionError as error:
            raise RegionError(f"{place.what}: {error}") from error

    def release(self) -> None:
        """Give the regions and the copies back; call it once, when the step has ended."""
        for block in self._blocks:
            block.release()
        for region in self._held:
            self._regions.release(region)

    def _use(self, place: RegionSlice, alignment: int) -> Region:
        region = self._regions.use(place.name)
        self._held.append(region)
        if place.offset + place.num_bytes > region.num_bytes:
            raise RegionError(
                f"expected to lie within the {region.num_bytes} bytes of region {place.name!a:.80}, "
                f"got {place.num_bytes} bytes at {place.offset}"
            )
        # An allocation begins at a multiple of at least 256 bytes, a mapping at one of the page size.
        position = place.offset + (region.memory.start if isinstance(region.memory, SystemMemory) else 0)
        if position % alignment:
            raise RegionError(f"expected to begin at a multiple of {alignment} bytes, got {position}")
        return region

    def _memory(self, num_bytes: int) -> memoryview:
        if num_bytes <= _SMALL_BYTES:
            return memoryview(bytearray(num_bytes))
        block = self._take(num_bytes)
        if block is None:
            raise NoBlockError
        self._blocks.append(block)
        return block.view
