"""What goes into a step of a layer and what comes out of it, as bytes; without torch."""

from dataclasses import dataclass

from expertd.layout import Layout

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """One caller's tensors: row-major bytes whose sizes were checked, and their Open Inference datatypes.

    hidden_states [num_tokens, H] of `datatype` (BF16, FP16, FP32); topk_ids [num_tokens, k] of
    `topk_ids_datatype` (INT32, INT64) and topk_weights [num_tokens, k] FP32, both or neither.
    """

    num_tokens: int
    hidden_states: Buffer
    datatype: str
    topk_ids: Buffer | None
    topk_ids_datatype: str
    topk_weights: Buffer | None
    output_datatype: str


def zero_request(num_tokens: int, hidden_size: int) -> LayerRequest:
    """Tokens of zeros, to see whether a layer computes."""
    return LayerRequest(num_tokens, bytes(num_tokens * hidden_size * 4), "FP32", None, "INT32", None, "FP32")


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave: each request's rows [num_tokens, H] in its output_datatype; facts for metrics."""

    outputs: list[memoryview | bytes]
    layout: Layout
    num_tokens: int
    tokens_per_expert: list[int]
    compute_seconds: float
