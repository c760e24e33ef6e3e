"""What front end and ranks send each other: commands and ends of steps in rings, all else over a socket.

A command is a step, or a part of a change of placement, which all ranks carry out between the same two steps.
What they say about that comes back over the socket, where it delays no step.
"""

import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertd.layout import Layout
from expertd.service.moe.placement.rounds import Fetch
from expertd.service.moe.request import FP8
from expertd.service.moe.step.step_counts import StoreCounts

DATATYPES = ("BF16", "FP16", "FP32", FP8)  # FP8: of hidden states alone
ID_DATATYPES = ("INT32", "INT64")
ERROR_BYTES = 512
NO_STEP = bytes(8)  # a step's command begins with its number, which is never 0
MOVED = (
    "moved"  # from a rank: a `MoveCommand`'s number, its seconds, and a sentence instead of "" if it failed
)
_MESSAGE_BYTES = 32768  # a set of partitions has the most: 32 names of 64 characters
_MAX_TEXT = 600  # characters of an error in a message, each of up to 6 bytes
_MAX_DESCRIPTORS = 4

_NUMBER = struct.Struct("<Q")  # of a step
_STEP = struct.Struct("<II")  # model, requests
# tokens, datatypes of hidden_states, topk_ids and output, region and offset of the five tensors
_REQUEST = struct.Struct("<IBBBx5I5Q")
# number, seconds, layout, bytes of the error, experts, empty slots, the numbers of `StoreCounts`
_ENDED = struct.Struct("<QdIIIIQQQd")
_LAYOUTS = tuple(Layout)
# 0, number, model, fetches, kind, start and end of the bytes, region
_MOVE = struct.Struct("<QQIII4xQQQ")
_FETCH = struct.Struct("<III4x")


class Place(NamedTuple):
    """A tensor's memory: the region that holds it, from 1 on, and the offset in it; region 0: no tensor."""

    region: int
    offset: int


NOWHERE = Place(0, 0)


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """One request of a step, by the places of its tensors; see `LayerRequest`."""

    num_tokens: int
    datatype: str
    topk_ids_datatype: str
    output_datatype: str
    hidden_states: Place
    topk_ids: Place
    topk_weights: Place
    output: Place
    scales: Place = NOWHERE

    def packed(self) -> bytes:
        places = (self.hidden_states, self.topk_ids, self.topk_weights, self.output, self.scales)
        return _REQUEST.pack(
            self.num_tokens,
            DATATYPES.index(self.datatype),
            ID_DATATYPES.index(self.topk_ids_datatype),
            DATATYPES.index(self.output_datatype),
            *(place.region for place in places),
            *(place.offset for place in places),
        )

    @classmethod
    def unpacked(cls, data: bytes) -> "PlacedRequest":
        num_tokens, datatype, ids, output, *numbers = _REQUEST.unpack(data)
        places = [Place(*place) for place in zip(numbers[:5], numbers[5:], strict=True)]
        return cls(num_tokens, DATATYPES[datatype], ID_DATATYPES[ids], DATATYPES[output], *places)


@dataclass(frozen=True, slots=True)
class StepCommand:
    """A step: its number, from 1 on, the model's place in the settings, and all of its requests."""

    number: int
    model: int
    requests: Sequence[PlacedRequest]

    def packed(self) -> bytes:
        return numbered(self.number, packed_body(self.model, self.requests))

    @classmethod
    def unpacked(cls, data: bytes) -> "StepCommand":
        number, body = number_and_body(data)
        return cls(number, *unpacked_body(body))


def packed_body(model: int, requests: Sequence[PlacedRequest]) -> bytes:
    """What a command says besides its number: the same for all steps of the same requests."""
    return _STEP.pack(model, len(requests)) + b"".join([request.packed() for request in requests])


def numbered(number: int, body: bytes) -> bytes:
    """A packed command: its number, and its `packed_body`."""
    return _NUMBER.pack(number) + body


def number_and_body(data: bytes) -> tuple[int, bytes]:
    """A packed command's number, and its `packed_body`."""
    return _NUMBER.unpack_from(data)[0], data[_NUMBER.size :]


def unpacked_body(body: bytes) -> tuple[int, list[PlacedRequest]]:
    """The model and the requests that were packed."""
    model, num_requests = _STEP.unpack_from(body)
    starts = range(_STEP.size, _STEP.size + num_requests * _REQUEST.size, _REQUEST.size)
    return model, [PlacedRequest.unpacked(body[start : start + _REQUEST.size]) for start in starts]


def body_bytes(num_requests: int) -> int:
    """The bytes of a `packed_body`."""
    return _STEP.size + num_requests * _REQUEST.size


def step_bytes(max_requests: int) -> int:
    """The most bytes of a step's command."""
    return _NUMBER.size + body_bytes(max_requests)


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A step's end on one rank: an error (""; none), or its seconds and the tokens of each expert there.

    empty_slots  of the rank's own tokens; see `StepResult`
    store        what the rank's store of the layer's experts has done since the last end
    """

    number: int
    error: str
    seconds: float
    layout: Layout
    tokens_per_expert: NDArray[np.int64]
    empty_slots: int = 0
    store: StoreCounts = field(default_factory=StoreCounts)

    @classmethod
    def failed(cls, number: int, error: str) -> "StepEnd":
        """The end of a step that failed."""
        return cls(number, error, 0.0, Layout.CONTIGUOUS, np.zeros(0, np.int64))

    def packed(self) -> bytes:
        error = self.error.encode()[:ERROR_BYTES]
        tokens = self.tokens_per_expert
        sizes = len(error), len(tokens), self.empty_slots
        layout, store = _LAYOUTS.index(self.layout), astuple(self.store)
        head = _ENDED.pack(self.number, self.seconds, layout, *sizes, *store)
        return head + error + tokens.tobytes()

    @classmethod
    def unpacked(cls, data: bytes) -> "StepEnd":
        number, seconds, layout, error_bytes, num_experts, empty_slots, *store = _ENDED.unpack_from(data)
        start = _ENDED.size + error_bytes
        error = data[_ENDED.size : start].decode(errors="replace")
        tokens = np.frombuffer(data[start : start + 8 * num_experts], np.int64)
        return cls(number, error, seconds, _LAYOUTS[layout], tokens, empty_slots, StoreCounts(*store))


def end_bytes(max_experts: int) -> int:
    """The most bytes of a step's end."""
    return _ENDED.size + ERROR_BYTES + 8 * max_experts


class MoveKind(IntEnum):
    """What ranks do with the experts of a round.

    FETCH    send and receive bytes `start` to `end` of each
    PREPARE  the matrix number `start` of each, for the switch
    SWITCH   put them into their slots; all ranks use the new placement from here on
    """

    FETCH = 0
    PREPARE = 1
    SWITCH = 2


@dataclass(frozen=True, slots=True)
class MoveCommand:
    """A part of a round.

    region  of the memory that ranks fetch into, if they share it; see `SharedTransport`
    """

    number: int
    model: int
    kind: MoveKind
    fetches: Sequence[Fetch]
    start: int = 0
    end: int = 0
    region: int = 0

    def packed(self) -> bytes:
        count, span = len(self.fetches), (self.start, self.end)
        head = _MOVE.pack(0, self.number, self.model, count, self.kind, *span, self.region)
        return head + b"".join([_FETCH.pack(*fetch) for fetch in self.fetches])

    @classmethod
    def unpacked(cls, data: bytes) -> "MoveCommand":
        _, number, model, count, kind, start, end, region = _MOVE.unpack_from(data)
        starts = range(_MOVE.size, _MOVE.size + count * _FETCH.size, _FETCH.size)
        return cls(
            number,
            model,
            MoveKind(kind),
            [Fetch(*_FETCH.unpack_from(data, at)) for at in starts],
            start,
            end,
            region,
        )


def move_bytes(num_ranks: int) -> int:
    """The most bytes of a command: each rank fetches one expert at a time."""
    return _MOVE.size + num_ranks * _FETCH.size


def send(connection: socket.socket, *message: Any, descriptors: Sequence[int] = ()) -> None:
    """Send values as one message, with descriptors; long texts are cut.

    Raises OSError, and ValueError for more bytes than `receive` takes.
    """
    values = [each[:_MAX_TEXT] if isinstance(each, str) else each for each in message]
    data = json.dumps(values, ensure_ascii=False).encode(errors="replace")
    if len(data) > _MESSAGE_BYTES:
        raise ValueError(f"message: expected at most {_MESSAGE_BYTES} bytes, got {len(data)}")
    socket.send_fds(connection, [data], list(descriptors))


def receive(connection: socket.socket) -> tuple[list[Any], list[int]]:
    """The next message, and its descriptors, which belong to the caller; empty at the connection's end."""
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _MAX_DESCRIPTORS)
    except ConnectionError:
        return [], []
    return (json.loads(data) if data else []), descriptors
