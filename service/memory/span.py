"""A piece of memory that the engine's device can read and write in place."""

from collections.abc import Callable
from dataclasses import dataclass

Buffer = bytes | bytearray | memoryview

Unregister = Callable[[], None]
Register = Callable[[int, int], Unregister]
"""Makes host memory (address, bytes) accessible to the device; returns the function that ends it."""


def nothing_to_register(address: int, num_bytes: int) -> Unregister:
    """A CPU accesses all host memory."""
    return lambda: None


@dataclass(frozen=True, slots=True)
class Span:
    """`num_bytes` at `address`: host memory that is registered with the device, or a GPU's memory.

    device  index of the GPU; None: host memory, whose bytes are `view`
    owner   what keeps the memory mapped
    """

    address: int
    num_bytes: int
    device: int | None = None
    view: memoryview | None = None
    owner: object = None

    def part(self, offset: int, num_bytes: int) -> "Span":
        """`num_bytes` from `offset` on, which must lie inside."""
        if not 0 <= offset <= offset + num_bytes <= self.num_bytes:
            raise ValueError(f"span: expected a part of {self.num_bytes} bytes, got {num_bytes} at {offset}")
        view = None if self.view is None else self.view[offset : offset + num_bytes]
        return Span(self.address + offset, num_bytes, self.device, view, self.owner)


def host_view(memory: Buffer | Span) -> memoryview:
    """The bytes of a buffer, or of a span of host memory."""
    if not isinstance(memory, Span):
        return memoryview(memory)
    if memory.view is None:
        raise ValueError(f"memory: expected a span of host memory, got one of GPU {memory.device}")
    return memory.view
