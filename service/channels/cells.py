"""Where an HTTP process puts a request's tensors in its channel's data region."""

from collections.abc import Sequence

import numpy as np

from expertd.service.engine.errors import MemoryFullError
from expertd.service.memory import Arena, Block, Buffer, Span, host_view
from expertd.service.moe.request import LayerRequest
from expertd_client.channel.layout import ALIGNMENT, aligned

CELL_BYTES = 128 * 1024  # for the small tensors of one request


class RequestBuffers:
    """The beginning of `region`, with a cell for each request; spans of the rest are used where they are.

    free  the cells that no request has
    """

    def __init__(self, region: memoryview, num_cells: int) -> None:
        self._region = region
        self._address = int(np.frombuffer(region, np.uint8).ctypes.data)
        self._first = num_cells * CELL_BYTES
        self.free = set(range(num_cells))
        self._num_cells = num_cells

    def place(
        self, cell: int, inputs: Sequence[Buffer | Span | None], output: Span | int, arena: Arena
    ) -> tuple[list[int], Block | None]:
        """The offsets of the inputs and of the output (a span, or the bytes that it needs).

        Inputs that are not in the region are copied, into `cell` or into a block of `arena`, which
        is returned. Raises MemoryFullError.
        """
        offsets = [0 if tensor is None else self._offset(tensor) for tensor in inputs]
        offsets.append(-1 if isinstance(output, int) else self._offset(output))
        sizes = [
            _size(tensor) if offset < 0 and tensor is not None else 0
            for tensor, offset in zip((*inputs, output), offsets, strict=True)
        ]
        rooms = [aligned(size) for size in sizes]
        total = sum(rooms)
        start, block = cell * CELL_BYTES, None
        if total > CELL_BYTES:
            block = arena.take(total)
            if block is None:
                text = "limits.max_buffered_bytes: expected memory for the request, got all of it in use"
                raise MemoryFullError(text)
            start = block.span.address - self._address
        for index, tensor in enumerate((*inputs, None)):
            if offsets[index] < 0:
                offsets[index] = start
                if tensor is not None:
                    self._region[start : start + sizes[index]] = host_view(tensor)
                start += rooms[index]
        return offsets, block

    def cell_for(self, slot: int) -> int:
        """A free cell; the same one for a slot if possible, because the server keeps what it has parsed."""
        cell = slot % self._num_cells
        return cell if cell in self.free else next(iter(self.free))

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy of an output."""
        return bytes(self._region[offset : offset + num_bytes])

    def _offset(self, tensor: Buffer | Span) -> int:
        """Where a span lies in the arena; -1 if it is elsewhere, or not aligned."""
        if not isinstance(tensor, Span):
            return -1
        offset = tensor.address - self._address
        inside = self._first <= offset <= len(self._region) - tensor.num_bytes
        return offset if inside and not offset % ALIGNMENT else -1


def int32_ids(request: LayerRequest) -> Buffer | Span | None:
    """topk_ids as a channel has them; 64-bit ones have passed `validate`."""
    if request.topk_ids is None or request.topk_ids_datatype == "INT32":
        return request.topk_ids
    return np.frombuffer(host_view(request.topk_ids), np.int64).astype(np.int32).tobytes()


def _size(tensor: Buffer | Span | int) -> int:
    if isinstance(tensor, int):
        return tensor
    return tensor.num_bytes if isinstance(tensor, Span) else len(tensor)
