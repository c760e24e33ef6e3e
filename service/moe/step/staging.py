"""Memory and streams of steps on a GPU, made once for two steps: one copies while the other computes."""

import time
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from expertd.limits import MAX_GROUPS
from expertd.service.device import Device, GraphPool, Stream
from expertd.service.memory import Buffer, Span, host_view
from expertd.service.moe.request import LayerRequest
from expertd.service.moe.step.step_counts import HostCopies

T = TypeVar("T")

ALIGNMENT = 16  # bytes, of rows that kernels read and write in place
_STEPS = 2


class GrowingBuffer:
    """Bytes on the GPU, or pinned on the host, which grow to the largest step."""

    def __init__(self, device: Device, is_pinned: bool) -> None:
        self.generation = 0  # of its memory
        self._device, self._is_pinned = device, is_pinned
        self._bytes = self._empty(0)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], uninitialized; valid until the next call. The current stream is the step's."""
        if num_bytes > self._bytes.numel():
            self.generation += 1
            self._bytes = self._empty(0)  # freed first
            self._bytes = self._empty(num_bytes)
            if not self._is_pinned:
                # A step that runs on this stream may still use the memory, and copies do not wait for it.
                self._device.current_stream().synchronize()
        return self._bytes[:num_bytes]

    @property
    def num_bytes(self) -> int:
        """Its present size."""
        return self._bytes.numel()

    def _empty(self, num_bytes: int) -> Tensor:
        if self._is_pinned:
            return self._device.pinned(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device.tensors)


class StepBuffers:
    """What one step needs besides the layer."""

    def __init__(self, device: Device) -> None:
        self.host_in, self.host_out, self.host_routing = (
            GrowingBuffer(device, is_pinned=True) for _ in range(3)
        )
        self.device_in, self.device_out, self.device_routing = (
            GrowingBuffer(device, is_pinned=False) for _ in range(3)
        )
        self.offsets = device.pinned(MAX_GROUPS + 2, dtype=torch.int32).zero_()  # see `count_named`
        self.host_offsets = self.offsets.numpy()
        self.copied_in, self.computed, self.copied_out = (device.new_event() for _ in range(3))
        self.pool: GraphPool | None = None  # of graphs that use these
        self.kept: list[Tensor] = []  # until the step ends: copies read them on another stream


class Staging:
    """The buffers of a device's steps, which its layers share, and its streams for copies each way."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.copy_in, self.copy_out = device.new_stream(), device.new_stream()
        self.host_copies = HostCopies()
        self._all = [StepBuffers(device) for _ in range(_STEPS)]
        self._free = [*self._all]
        self._shared: dict[object, Any] = {}
        self._ended = 0.0

    def prepare(self, max_tokens: int, hidden_size: int, top_k: int, itemsize: int) -> None:
        """Allocate for steps of up to `max_tokens`, so that no step has to."""
        for step in self._free:
            for buffer in (step.host_in, step.host_out, step.device_in, step.device_out):
                buffer.take(max_tokens * hidden_size * itemsize)
            for buffer in (step.host_routing, step.device_routing):
                buffer.take(max_tokens * top_k * 8)

    def shared(self, key: object, make: Callable[[], T]) -> T:
        """What `make` returned for `key` the first time: memory that the graphs of several layers use."""
        if key not in self._shared:
            self._shared[key] = make()
        made: T = self._shared[key]
        return made

    def forget_shared(self, kept: Container[object]) -> None:
        """Drop what `shared` has, but for these keys; no step is running."""
        self._shared = {key: made for key, made in self._shared.items() if key in kept}

    def allow_graphs(self) -> None:
        """Let steps be captured as graphs; no step is running."""
        for step in self._free:
            step.pool = step.pool or self.device.new_graph_pool()

    def release_graphs(self) -> None:
        """Capture no more graphs, and free their memory with the last of them; no step is running."""
        for step in self._free:
            step.pool = None

    def take(self) -> StepBuffers:
        """Buffers that no step uses. Raises RuntimeError if two steps are running."""
        if not self._free:
            where = self.device.tensors
            raise RuntimeError(f"steps: expected at most {_STEPS} at a time on {where}, got another")
        return self._free.pop()

    def give_back(self, step: StepBuffers) -> None:
        """Take back the buffers of a step that has ended."""
        step.kept.clear()
        self._free.append(step)

    def signal(self, requests: Sequence[LayerRequest], stream: Stream) -> None:
        """Write every request's signal once its output is there: before the host has noticed."""
        for request in requests:
            if (signal := request.signal) is not None:
                self.device.signal(signal.address, signal.value, stream)

    @property
    def device_bytes(self) -> int:
        """Memory of the GPU."""
        buffers = [
            buffer for step in self._all for buffer in (step.device_in, step.device_out, step.device_routing)
        ]
        return sum(buffer.num_bytes for buffer in buffers)

    def seconds_since(self, began: float) -> float:
        """The time that a step took which ends now, without the part in which the GPU ran the step before."""
        ended = time.perf_counter()
        seconds = ended - max(began, self._ended)
        self._ended = ended
        return seconds


class PinnedRows:
    """Pinned memory for a number of rows of the same size; `copies` counts what is copied to it."""

    def __init__(self, num_rows: int, row_bytes: int, device: Device, copies: HostCopies) -> None:
        self._copies = copies
        self._tensor = device.pinned(num_rows * row_bytes)
        self._array = self._tensor.numpy()
        self._address = self._tensor.data_ptr()
        self._row_bytes = row_bytes

    def address(self, row: int) -> int:
        """The address of `row`."""
        return self._address + row * self._row_bytes

    def rows(self, first: int, num_bytes: int) -> memoryview:
        """`num_bytes` from row `first` on."""
        start = first * self._row_bytes
        return memoryview(self._array[start : start + num_bytes])  # type: ignore[arg-type]

    def hold(self, memory: Buffer | Span, first: int, alignment: int) -> int:
        """The address of `memory` if the GPU can read it there; else of a copy, from row `first` on."""
        if isinstance(memory, Span) and is_aligned(memory, alignment):
            return memory.address
        view = host_view(memory)
        self._copies.copy(self.rows(first, view.nbytes), view)
        return self.address(first)


def is_aligned(memory: Span, alignment: int = ALIGNMENT) -> bool:
    """Whether kernels can read and write `memory` in place."""
    return memory.address % alignment == 0


def address_of(memory: Buffer | Span, copy: Tensor, copies: HostCopies) -> int:
    """The address of `memory` if the GPU can read it; else of `copy`, pinned, to which it is copied."""
    if isinstance(memory, Span):
        return memory.address
    copies.copy(copy.view(torch.uint8).view(-1).numpy().data, host_view(memory))
    return copy.data_ptr()
