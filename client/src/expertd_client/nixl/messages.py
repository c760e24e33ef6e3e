"""What the processes at the two ends of a channel tell each other, to the byte.

The first byte of a message is its kind; numbers are little-endian u64:

| kind    | then                           | means                                                         |
|---------|--------------------------------|---------------------------------------------------------------|
| HELLO   |                                | the sender is there; sent every second, too                   |
| BYE     |                                | the channel is closed; nothing follows                        |
| REQUEST | sequence, 56 bytes, inputs     | the request line behind its sequence, and small tensors       |
| CANCEL  | sequence                       | the request is not wanted any more                            |
| ANSWER  | sequence, 32 bytes, the times' | the answer line up to the sequence of its times; the text of  |
|         | sequence, text or output       | an error, or a small output                                   |
| EXPIRED | sequence                       | the timeout has passed during the request's step              |
| TIMES   | sequence, queue_ns, compute_ns | if they were not there at the answer                          |

Large tensors are written to their places in the other end's memory before the message.
"""

import struct
from functools import lru_cache
from typing import NamedTuple

from expertd_client.arrays import ITEM_BYTES
from expertd_client.channel.layout import CODES, FP8_CODE, REQUEST, ROUTED
from expertd_client.nixl.agent import Ranges

HELLO, BYE, CANCEL, EXPIRED, TIMES = 1, 2, 3, 4, 5
REQUEST_KIND, ANSWER_KIND = 6, 7
WORD = struct.Struct("<BQ")  # kind, sequence
TIMED = struct.Struct("<B3Q")
ANSWERED = struct.Struct(
    "<BQ32sQ"
)  # kind, sequence, answer line from its status to compute_ns, times' sequence
STATUS = struct.Struct("<II")  # an answer line's first fields: the status, and bytes of the error's text
REQUEST_BYTES = WORD.size + REQUEST.size
INLINE_BYTES = 16 << 10  # of tensors that are sent in the message: a write takes longer than to copy them
_ELEMENT_BYTES = {code: ITEM_BYTES[name] for name, code in CODES.items()}
_FP8_BLOCK = 128  # columns that have a scale in fp32


class Places(NamedTuple):
    """Where a request's tensors are, and their bytes; `inputs` is empty if the server will refuse it."""

    inputs: Ranges
    output: Ranges
    input_bytes: int
    output_bytes: int


class Shape(NamedTuple):
    """What the places of a line's tensors depend on in a channel."""

    max_tokens: int
    hidden_size: int
    top_k: int
    data_bytes: int


@lru_cache(1024)
def places_of(line: bytes, shape: Shape) -> Places:
    """Where the tensors of a request line, without its sequence, lie."""
    tokens, datatype, output_datatype, flags, _, *offsets, _, _ = REQUEST.unpack(line)
    hidden = shape.hidden_size
    row = hidden * _ELEMENT_BYTES.get(datatype, 0)
    if datatype == FP8_CODE:
        row = hidden + hidden // _FP8_BLOCK * 4
    routing = tokens * shape.top_k * 4
    inputs = [(offsets[0], tokens * row)]
    if flags & ROUTED:
        inputs += [(offsets[1], routing), (offsets[2], routing)]
    output = (offsets[3], tokens * hidden * _ELEMENT_BYTES.get(output_datatype, 0))
    is_valid = tokens <= shape.max_tokens and all(
        size > 0 and offset + size <= shape.data_bytes for offset, size in [*inputs, output]
    )
    if not is_valid:
        return Places((), (), 0, 0)
    return Places(tuple(inputs), (output,), sum(size for _, size in inputs), output[1])
