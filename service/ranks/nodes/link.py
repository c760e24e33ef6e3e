"""The connection between a rank of another node and its proxy beside the front end: a gloo group of two.

A message is a kind, a few bytes that describe it, and a payload that lies in tensors at both ends.
"""

import json
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from expertd.service.memory import Buffer, Span, host_view
from expertd.service.moe.request import LayerRequest
from expertd.service.ranks.messages import NOWHERE, Place, PlacedRequest, StepCommand
from expertd.service.ranks.rendezvous import Rendezvous
from expertd.service.ranks.worker.own_steps import BYTES

_HEAD = struct.Struct("<QQQ")  # kind, bytes of the text and of the payload
_FIRST_BYTES = 4096  # sizes are fixed in advance: the first part of a message has the head and most texts
_NEVER = timedelta(days=3650)  # a link is idle as long as its server; a lost end closes its connection
_ALIGNMENT = 64


class MessageKind(IntEnum):
    """What a message is.

    STEP     to the rank: a step's command, and the rows of the rank
    MOVE     to the rank: a command that is no step, as it is in the ring
    END      from the rank: a step's end, and its rows of the output
    CONTROL  either way: a list of JSON, without payload
    TRACE    from the rank: what it has recorded
    """

    STEP = 0
    END = 1
    CONTROL = 2
    MOVE = 3
    TRACE = 4


class LinkMessage(NamedTuple):
    """A message whose payload, of `num_bytes`, has to be taken next."""

    kind: MessageKind
    text: bytes
    num_bytes: int

    @property
    def words(self) -> list[Any]:
        """The list of a CONTROL message."""
        words: list[Any] = json.loads(self.text)
        return words


class NodeLink:
    """One end. Any thread sends, one receives. Both raise RuntimeError once the other end is gone.

    end  0: the proxy; 1: the rank
    """

    def __init__(self, rendezvous: Rendezvous, generation: int, rank: int, end: int) -> None:
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=rendezvous.address)]
        options._timeout = _NEVER
        store = rendezvous.store(f"{generation}/link/{rank}", _NEVER.total_seconds())
        self._group = gloo(store, end, 2, options)
        self._other = 1 - end
        self._sending = threading.Lock()

    def send(self, kind: MessageKind, text: bytes, payload: Tensor | None = None) -> None:
        """Send a message. payload: uint8 [N]; None: empty."""
        num_bytes = 0 if payload is None else payload.numel()
        first = np.zeros(_FIRST_BYTES, np.uint8)
        first[: _HEAD.size] = np.frombuffer(_HEAD.pack(kind, len(text), num_bytes), np.uint8)
        inside = min(len(text), _FIRST_BYTES - _HEAD.size)
        first[_HEAD.size : _HEAD.size + inside] = np.frombuffer(text[:inside], np.uint8)
        with self._sending:
            self._send(torch.from_numpy(first))
            if inside < len(text):
                self._send(torch.frombuffer(bytearray(text[inside:]), dtype=torch.uint8))
            if payload is not None and num_bytes:
                self._send(payload)

    def tell(self, *words: Any) -> None:
        """Send a CONTROL message."""
        self.send(MessageKind.CONTROL, json.dumps(words).encode())

    def receive(self) -> LinkMessage:
        """The next message, whose payload `take` takes."""
        first = np.empty(_FIRST_BYTES, np.uint8)
        self._receive(torch.from_numpy(first))
        kind, text_bytes, num_bytes = _HEAD.unpack_from(first.data)
        text = first[_HEAD.size :][:text_bytes].tobytes()
        if len(text) < text_bytes:
            rest = np.empty(text_bytes - len(text), np.uint8)
            self._receive(torch.from_numpy(rest))
            text += rest.tobytes()
        return LinkMessage(MessageKind(kind), text, num_bytes)

    def take(self, payload: Tensor) -> None:
        """Take a payload into uint8 [num_bytes]."""
        if payload.numel():
            self._receive(payload)

    def _send(self, tensor: Tensor) -> None:
        self._group.send([tensor], self._other, 0).wait()

    def _receive(self, tensor: Tensor) -> None:
        self._group.recv([tensor], self._other, 0).wait()


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
