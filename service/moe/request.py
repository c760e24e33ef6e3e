"""The input and output of a layer's step, as bytes or spans of memory; imports no torch."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expertd.layout import Layout
from expertd.service.memory.span import Buffer, Span

Output = Buffer | Span


@dataclass(frozen=True, slots=True)
class LayerRequest:
    """One request's tensors: row-major bytes of validated size, and Open Inference Protocol datatypes.

    hidden_states [num_tokens, H] of `datatype` (BF16, FP16, FP32); topk_ids [num_tokens, top_k] of
    `topk_ids_datatype` (INT32, INT64) and topk_weights [num_tokens, top_k] FP32, both or neither. A step
    reads spans in place, and copies buffers. The output [num_tokens, H] of `output_datatype` is written to
    `output`; None: to memory of the runner's own.
    """

    num_tokens: int
    hidden_states: Buffer | Span
    datatype: str
    topk_ids: Buffer | Span | None
    topk_ids_datatype: str
    topk_weights: Buffer | Span | None
    output_datatype: str
    output: Span | None = None


def zero_request(num_tokens: int, hidden_size: int) -> LayerRequest:
    """A request of zeros, for checking that a layer computes."""
    return LayerRequest(num_tokens, bytes(num_tokens * hidden_size * 4), "FP32", None, "INT32", None, "FP32")


@dataclass(slots=True)  # not frozen: that takes a microsecond longer in every step
class StepResult:
    """A step's result: each request's rows [num_tokens, H] in its output_datatype, and what metrics need.

    An output is the request's own `output`, or else bytes. tokens_per_expert has an entry for each of the
    layer's experts, and counts those that are held here.
    """

    outputs: list[Output]
    layout: Layout
    num_tokens: int
    tokens_per_expert: NDArray[np.integer[Any]]
    compute_seconds: float
