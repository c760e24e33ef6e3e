"""The rows of a rank on another node, side by side in memory of that node: inputs first, then outputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from expertd.service.memory import Buffer, Span, host_view
from expertd.service.moe.request import LayerRequest
from expertd.service.ranks.messages import NOWHERE, Place, PlacedRequest, StepCommand
from expertd.service.ranks.split import BYTES

_ALIGNMENT = 64


@dataclass(frozen=True)
class PackedStep:
    """A rank's rows of a step.

    command   for the rank: its requests, placed in one region
    inputs    uint8 [N], the region's first bytes
    outputs   the region's bytes in which the rank writes rows, which come back as one payload
    """

    command: StepCommand
    inputs: NDArray[np.uint8]
    outputs: range


class _Region:
    """Hands out places in a region, and remembers what belongs there."""

    def __init__(self, number: int) -> None:
        self.num_bytes = 0
        self.parts: list[tuple[int, memoryview]] = []
        self._number = number

    def place(self, num_bytes: int) -> Place:
        place = Place(self._number, self.num_bytes)
        self.num_bytes += _aligned(num_bytes)
        return place

    def put(self, tensor: Buffer | Span | None) -> Place:
        if tensor is None:
            return NOWHERE
        view = host_view(tensor).cast("B")
        place = self.place(len(view))
        self.parts.append((place.offset, view))
        return place


def pack(
    number: int, model: int, requests: Sequence[LayerRequest], hidden_size: int, region: int
) -> PackedStep:
    """The step `number` of a model with these requests, which lie in host memory, in `region` of the rank."""
    memory = _Region(region)
    inputs = [
        (memory.put(request.hidden_states), memory.put(request.topk_ids), memory.put(request.topk_weights))
        for request in requests
    ]
    packed = np.empty(memory.num_bytes, np.uint8)
    for offset, view in memory.parts:
        packed[offset : offset + len(view)] = view
    placed = [
        PlacedRequest(
            request.num_tokens,
            request.datatype,
            request.topk_ids_datatype,
            request.output_datatype,
            hidden_states,
            topk_ids,
            topk_weights,
            memory.place(_output_bytes(request, hidden_size)),
        )
        for request, (hidden_states, topk_ids, topk_weights) in zip(requests, inputs, strict=True)
    ]
    command = StepCommand(number, model, placed)
    return PackedStep(command, packed, outputs_of(command, hidden_size))


def outputs_of(command: StepCommand, hidden_size: int) -> range:
    """The bytes of a packed step's region in which its outputs are."""
    first, last = command.requests[0].output, command.requests[-1]
    return range(first.offset, last.output.offset + _aligned(_output_bytes(last, hidden_size)))


def unpack(outputs: NDArray[np.uint8], step: PackedStep, requests: Sequence[LayerRequest]) -> None:
    """Write the rank's rows, uint8 [len(step.outputs)], to the requests' own memory."""
    for request, placed in zip(requests, step.command.requests, strict=True):
        if request.output is not None:
            start = placed.output.offset - step.outputs.start
            view = host_view(request.output).cast("B")
            view[:] = outputs[start : start + len(view)].data


def _output_bytes(request: LayerRequest | PlacedRequest, hidden_size: int) -> int:
    return request.num_tokens * hidden_size * BYTES[request.output_datatype]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
