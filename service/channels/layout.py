"""The control memory of a channel, to the byte, as docs/internals/channels.md has it; imports no torch."""

import struct
from dataclasses import asdict, dataclass, replace
from typing import Self

from expertd.service.engine.refusals import Reason
from expertd.service.moe.request import FP8

MAGIC = b"expertd\0"
VERSION = 3
GREETING = MAGIC + struct.pack("<I", VERSION)  # what a claimed channel's socket sends, with the descriptors
TOKEN_BYTES = 32
READY = b"\1"  # what a channel of device calls sends once it has the memory for answers
ALIGNMENT = 64  # of every tensor in the data region

# magic, version, header_bytes, the fields of Geometry in their order, control_bytes
HEADER = struct.Struct("<8s6I7Q")
HEADER_BYTES = 256
SLOT_BYTES = 512
CANCELS_OFFSET = 192  # in the header, written by the caller: how many requests it has cancelled
ANNOUNCED_OFFSET = 200  # likewise: the latest request whose sequence its GPU will write
# Within a slot. Request and answer are written by one side each, 128 bytes apart: CPUs fetch pairs of lines.
CANCEL_OFFSET = 64
CALLER_OFFSET = 72  # of the number of a request's caller, if an HTTP process of the server has the channel
ANSWER_OFFSET = 128
ERROR_OFFSET = 192
ERROR_BYTES = SLOT_BYTES - ERROR_OFFSET

# num_tokens, two datatypes, flags, timeout_us, four offsets, priority, model: all but the sequence
REQUEST = struct.Struct("<IBBHQQQQQII")
FLAGS_BYTE = 6  # of those
CALLER = struct.Struct("<I")
# status, error_bytes, retry_after_ms, reason, queue_ns, compute_ns: all but the sequence
ANSWER = struct.Struct("<IIIIQQ")
TIMES_OFFSET = 24  # in the answer line: queue_ns, compute_ns, and the sequence that they belong to
EXPIRED_OFFSET = 48  # in the answer line: the latest request whose timeout has passed during its own step
FAILED_OFFSET = 56  # in the answer line: the latest request of a stream that has an error
SEQUENCE_BYTES = 8

DATATYPES = {1: ("BF16", 2), 2: ("FP16", 2), 3: ("FP32", 4)}  # code -> name, bytes
FP8_CODE = 4  # of hidden states alone: rows of `expertd.service.moe.request.row_bytes`
DATATYPE_CODES = {name: code for code, (name, _) in DATATYPES.items()} | {FP8: FP8_CODE}
ROUTED = 1  # a flag: topk_ids and topk_weights are given
ON_STREAM = 2  # a flag: a stream of the caller's GPU waits for the answer's sequence
# Why a request has no output; 0: it has one.
REASON_CODES: dict[Reason, int] = {
    "invalid_request": 1,
    "too_many_tokens": 2,
    "client_gone": 3,
    "step_failed": 4,
    "queue_full": 5,
    "queue_timeout": 6,
    "shutting_down": 7,
    "not_ready": 8,
    "unknown_model": 9,
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a channel, and the default place of each slot's tensors in the data region, in bytes.

    Slot i has the default places i * data_slot_bytes + the four offsets; data_slot_bytes is 0 if there are
    none, and the caller places its tensors itself.
    """

    num_slots: int
    max_tokens: int
    hidden_size: int
    top_k: int
    data_bytes: int
    data_slot_bytes: int
    hidden_states_offset: int
    topk_ids_offset: int
    topk_weights_offset: int
    output_offset: int

    @classmethod
    def for_slots(
        cls, num_slots: int, max_tokens: int, hidden_size: int, top_k: int, element_bytes: int
    ) -> Self:
        """A region with room for `max_tokens` of `element_bytes` in every slot."""
        rows = aligned(max_tokens * hidden_size * element_bytes)
        routing = aligned(max_tokens * top_k * 4)
        slot = aligned(2 * rows + 2 * routing, 4096)
        offsets = (0, rows, rows + routing, rows + 2 * routing)
        return cls(num_slots, max_tokens, hidden_size, top_k, num_slots * slot, slot, *offsets)

    def within(self, data_bytes: int) -> Self:
        """The same in a region of `data_bytes`: without default places if they do not fit."""
        if data_bytes >= self.data_bytes:
            return replace(self, data_bytes=data_bytes)
        return type(self)(
            self.num_slots, self.max_tokens, self.hidden_size, self.top_k, data_bytes, 0, 0, 0, 0, 0
        )

    @property
    def control_bytes(self) -> int:
        return HEADER_BYTES + self.num_slots * SLOT_BYTES

    def header(self) -> bytes:
        """The start of the control memory."""
        values = asdict(self).values()
        return HEADER.pack(MAGIC, VERSION, HEADER_BYTES, *values, self.control_bytes)

    def shown(self) -> dict[str, int]:
        """For JSON: the fields, and the constants of this version."""
        return asdict(self) | {
            "control_bytes": self.control_bytes,
            "header_bytes": HEADER_BYTES,
            "slot_bytes": SLOT_BYTES,
            "answer_offset": ANSWER_OFFSET,
            "error_offset": ERROR_OFFSET,
            "error_bytes": ERROR_BYTES,
        }


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple."""
    return -(-num_bytes // alignment) * alignment
