"""A channel to the byte, for callers and the server: version 3 of the server's docs/internals/channels.md."""

import struct

MAGIC = b"expertd\0"
VERSION = 3
GREETING = MAGIC + struct.pack("<I", VERSION)  # what a claimed channel's socket sends, with the descriptors
TOKEN_BYTES = 32
READY = b"\1"  # what a channel of device calls sends once it has the memory for answers
MAX_SLOTS = 4096
ALIGNMENT = 64  # of every tensor in the data region
WORD_BYTES = 8  # of a sequence, read and written at once

# magic, version, header_bytes, num_slots, max_tokens, hidden_size, top_k, data_bytes, data_slot_bytes, the
# offsets of hidden_states, topk_ids, topk_weights and output, control_bytes
HEADER = struct.Struct("<8s6I7Q")
HEADER_BYTES = 256
CANCELS_OFFSET = 192  # in the header, written by the caller: how many requests it has cancelled
ANNOUNCED_OFFSET = 200  # likewise: the latest request whose sequence its GPU will write

# Within a slot. Request and answer are written by one side each, 128 bytes apart: CPUs fetch pairs of lines.
SLOT_BYTES = 512
CANCEL_OFFSET = 64  # the sequence of a request to cancel
ANSWER_OFFSET = 128
ERROR_OFFSET = 192
ERROR_BYTES = SLOT_BYTES - ERROR_OFFSET

# num_tokens, two datatypes, flags, timeout_us, four offsets, priority, model: all but the sequence
REQUEST = struct.Struct("<IBBHQQQQQII")
FLAGS_BYTE, TIMEOUT_OFFSET = 6, 8  # of those
MODEL = struct.Struct("<I")  # the last of those
# From CANCEL_OFFSET on: the number of a request's caller, if an HTTP process of the server has the channel.
CALLER = struct.Struct("<8xI")
# status, bytes of the error's text, retry_after_ms, reason, queue_ns, compute_ns: all but the sequence
ANSWER = struct.Struct("<IIIIQQ")
TIMES_OFFSET = 24  # in the answer line: queue_ns, compute_ns, and the sequence that they belong to
EXPIRED_OFFSET = 48  # likewise: the latest request whose timeout has passed during its own step
FAILED_OFFSET = 56  # likewise: the latest request of a stream that has an error

CODES = {"BF16": 1, "FP16": 2, "FP32": 3}
FP8_CODE = 4  # of hidden states alone: e4m3 values, then the row's scales
ROUTED = 1  # a flag: topk_ids and topk_weights are given
ON_STREAM = 2  # a flag: a stream of the caller's GPU writes the sequence, and waits for that of the answer
REFUSED = 1 << 63  # in an answer's sequence, for a GPU: there is no output
# Why a request has no output; 0: another reason, or none
REASON_CODES = {
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


def aligned(num_bytes: int, alignment: int = ALIGNMENT) -> int:
    """`num_bytes`, or the next multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment
