"""The memory of a channel to the byte: version 3 of the server's docs/internals/channels.md."""

import platform
import struct
import threading

VERSION = 3
GREETING = b"expertd\0" + struct.pack("<I", VERSION)
HEADER_BYTES = 256
SLOT_BYTES = 512
CANCELS_OFFSET = 192  # in the header: how many requests the caller has cancelled
ANNOUNCED_OFFSET = 200  # in the header: the latest request whose sequence a GPU will write
CANCEL_OFFSET = 64  # within a slot: the sequence of a request to cancel
ANSWER_OFFSET = 128  # of the answer line within a slot
TIMES_OFFSET = 24  # in the answer line: queue_ns, compute_ns, and the sequence that they belong to
EXPIRED_OFFSET = 48  # likewise: the latest request whose timeout has passed during its own step
FAILED_OFFSET = 56  # likewise: the latest request of a stream that has an error
ERROR_OFFSET = 192  # of the error's text
WORD_BYTES = 8

# num_tokens, datatype, output datatype, flags, timeout_us, four offsets, priority: all but the sequence, in
# front of them, and the model's number behind.
REQUEST = struct.Struct("<IBBHQQQQQI")
MODEL = struct.Struct("<I")
FLAGS_BYTE, TIMEOUT_OFFSET = 6, 8  # in a line without its sequence
# status, bytes of the error's text, retry_after_ms, reserved, queue_ns, compute_ns: all but the sequence
ANSWER = struct.Struct("<IIIIQQ")
CODES = {"BF16": 1, "FP16": 2, "FP32": 3}
ROUTED = 1  # a flag: topk_ids and topk_weights are given
ON_STREAM = 2  # a flag: a GPU's stream writes the sequence, and waits for that of the answer
MAX_REQUESTS = 4096  # in flight, on the server's side: its slots
REFUSED = 1 << 63  # in an answer's sequence, for a GPU: there is no output

RING = (1).to_bytes(8, "little")  # what is added to the eventfd after each request

WEAKLY_ORDERED = platform.machine() not in ("x86_64", "AMD64")
_barrier = threading.Lock()


def fence() -> None:
    """Order the accesses to memory before this call with those after it. Needed where WEAKLY_ORDERED.

    The release of the first lock and the acquisition of the second one are the barrier.
    """
    with _barrier:
        pass
    with _barrier:
        pass
