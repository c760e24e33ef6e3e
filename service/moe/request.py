"""The input and output of a layer's step, as bytes; imports no torch."""

from dataclasses import dataclass

from expertd.layout import Layout

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """One request's tensors: row-major bytes of validated size, and Open Inference Protocol datatypes.

    hidden_states [num_tokens, H] of `datatype` (BF16, FP16, FP32); topk_ids [num_tokens, top_k] of
    `topk_ids_datatype` (INT32, INT64) and topk_weights [num_tokens, top_k] FP32, both or neither.
    """

    num_tokens: int
    hidden_states: Buffer
    datatype: str
    topk_ids: Buffer | None
    topk_ids_datatype: str
    topk_weights: Buffer | None
    output_datatype: str


def zero_request(num_tokens: int, hidden_size: int) -> LayerRequest:
    """A request of zeros, for checking that a layer computes."""
    return LayerRequest(num_tokens, bytes(num_tokens * hidden_size * 4), "FP32", None, "INT32", None, "FP32")


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's result: each request's rows [num_tokens, H] in its output_datatype, and what metrics need."""

    outputs: list[memoryview | bytes]
    layout: Layout
    num_tokens: int
    tokens_per_expert: list[int]
    compute_seconds: float
