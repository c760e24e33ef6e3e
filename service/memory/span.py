"""A piece of memory that the engine's device can read and write in place."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol, TypeGuard

Buffer = bytes | bytearray | memoryview

Unregister = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Mapped:
    """Host memory: `num_bytes` at `address`, mapped from `offset` of the file `descriptor` on."""

    address: int
    num_bytes: int
    descriptor: int
    offset: int = 0


Register = Callable[[Mapped], Unregister]
"""Makes host memory accessible to the device; returns the function that ends it."""


HIDDEN = -1


def nothing_to_register(memory: Mapped) -> Unregister:
    """A CPU accesses all host memory."""
    return lambda: None


@dataclass(frozen=True, slots=True)
class Span:
    """`num_bytes` at `address`: host memory that is registered with the device, or a GPU's memory.

    device  this process's number of the GPU, HIDDEN: one that it does not see; None: host memory
    view    the bytes of host memory; None: a GPU's memory, or host memory that only the device may access,
            by address, because its owner may take it away from the CPU (a caller's file, see SystemMemory)
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


def is_on_gpu(memory: object) -> TypeGuard[Span]:
    """Whether `memory` is a span of a GPU's memory, which the host does not read."""
    return isinstance(memory, Span) and memory.device is not None


def is_for_device_alone(memory: object) -> bool:
    """Whether `memory` is a span that the host does not read: a GPU's, or a caller's file."""
    return isinstance(memory, Span) and memory.view is None


def host_view(memory: Buffer | Span) -> memoryview:
    """The bytes of a buffer, or of a span of host memory."""
    if not isinstance(memory, Span):
        return memoryview(memory)
    if memory.view is None:
        got = "one for the device alone" if memory.device is None else f"one of GPU {memory.device}"
        raise ValueError(f"memory: expected a span of host memory, got {got}")
    return memory.view


Write = Callable[[int, memoryview], None]
"""Copies bytes of the host to an offset of other memory, where they are when it returns."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A GPU's memory of another process, accessible until `close`.

    identity  the same for all that start at the same place; None: the span's address tells
    write     from this process; None: only steps can write to it
    """

    span: Span
    close: Unregister
    identity: Hashable = None
    write: Write | None = None


HANDLE_BYTES = 64
"""Bytes of a CUDA IPC handle."""


def check_handle(handle: bytes) -> None:
    """Raise ValueError unless it has the size of a CUDA IPC handle."""
    if len(handle) != HANDLE_BYTES:
        raise ValueError(f"raw_handle: expected {HANDLE_BYTES} bytes, got {len(handle)}")


OpenCuda = Callable[[bytes, int], DeviceMemory]
"""Opens a CUDA IPC handle (64 bytes, and the bytes from its start on); raises ValueError."""


class SharedMemory(Protocol):
    """Memory of GPUs that two processes have; it lives as long as one of them has it, or its descriptor.

    address  where this device has it
    """

    @property
    def address(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...

    def descriptor(self) -> int:
        """A new descriptor of a file, for the other process, which belongs to the caller."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        """What is there; nothing writes it meanwhile."""

    def close(self) -> None:
        """Have it no more; nothing uses it."""
