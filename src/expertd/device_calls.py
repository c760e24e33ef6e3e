"""What kernels and the service both say of calls that callers' GPUs make by themselves; imports no torch."""

from collections.abc import Sequence
from typing import NamedTuple

MAX_SLOTS = 256
"""Slots of all callers of a GPU; as many as requests of a step."""
FIELD_BITS = 12
"""Of num_tokens and of the model in a call's header, one word; the other bits above them are its sequence."""
REFUSED = 1 << 63
"""In an answer, beside the sequence: the header was invalid."""


def header(sequence: int, num_tokens: int, model: int) -> int:
    """What a caller writes for a call; sequence: 1, 2, 3, ... of its slot, modulo 2**40."""
    return sequence << 2 * FIELD_BITS | model << FIELD_BITS | num_tokens


class CallSlot(NamedTuple):
    """Addresses of one slot, 16-byte aligned. On the server's GPU, written by the caller's:

    header         8 bytes, see `header`; written last
    hidden_states  bf16 [max_tokens, H]
    topk_ids       int32 [max_tokens, top_k]
    topk_weights   fp32 [max_tokens, top_k]

    On the caller's, written by the server's:

    answer         8 bytes: the sequence of the last call that has its output
    out            bf16 [max_tokens, H]

    max_tokens     at most those of the largest graph
    sequence       of the last call that needs no answer
    layers         the layer's number, for each model that a header may name
    """

    header: int
    hidden_states: int
    topk_ids: int
    topk_weights: int
    answer: int
    out: int
    max_tokens: int
    sequence: int = 0
    layers: Sequence[int] = ()


class CallCounts(NamedTuple):
    """Calls to a layer that have had their output so far, their tokens, and their steps and seconds."""

    calls: int = 0
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
