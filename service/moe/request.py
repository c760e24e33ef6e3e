"""The input and output of a layer's step, as bytes or spans of memory; imports no torch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expertd.layout import Layout
from expertd.limits import SCALE_BLOCK
from expertd.service.memory.span import Buffer, Span, host_view
from expertd.service.moe.step.stages import TimedStep

OutputMemory = Buffer | Span

FP8 = "FP8"
_ELEMENT_BYTES = {"BF16": 2, "FP16": 2, "FP32": 4}


@dataclass(slots=True)
class Signal:
    """8 bytes of memory that the device can write: it writes `value` there once the output is in its place.

    On a CPU nobody writes it.
    """

    address: int
    value: int = 0


class StepPlan(NamedTuple):
    """What the next step of the same request repeats.

    owner  who has made it, and alone understands `what`
    state  of the owner, in which it is valid
    """

    owner: object
    state: object
    what: Any


@dataclass(slots=True)
class LayerRequest:
    """One request's tensors: row-major bytes of validated size, and Open Inference Protocol datatypes.

    hidden_states [num_tokens, H] of `datatype` (BF16, FP16, FP32, or FP8: rows of `row_bytes`); topk_ids
    [num_tokens, top_k] of `topk_ids_datatype` (INT32, INT64) and topk_weights [num_tokens, top_k] FP32, both
    or neither. A step reads spans in place, and copies buffers. The output [num_tokens, H] of
    `output_datatype` is written to `output`; None: to memory of the runner's own. `plan` is the runner's.
    `scales` are those of FP8 values that lie apart from them, [num_tokens, H/128] FP32; only for a GPU. To
    `timed` the runner adds each of the request's steps, whose stages it then times; None: it does not.
    """

    num_tokens: int
    hidden_states: Buffer | Span
    datatype: str
    topk_ids: Buffer | Span | None
    topk_ids_datatype: str
    topk_weights: Buffer | Span | None
    output_datatype: str
    output: Span | None = None
    signal: Signal | None = None
    plan: StepPlan | None = field(default=None, repr=False, compare=False)
    scales: Buffer | Span | None = None
    timed: list[TimedStep] | None = field(default=None, repr=False, compare=False)

    def planned(self, owner: object, state: object = None) -> Any:
        """What `owner` keeps for the next step of this request in this state; None: nothing."""
        plan = self.plan
        return plan.what if plan is not None and plan.owner is owner and plan.state == state else None


def row_bytes(datatype: str, hidden_size: int) -> int:
    """Bytes of a token's hidden states. In FP8: its e4m3 values, then their fp32 scales, one for each 128."""
    if datatype == FP8:
        return hidden_size + 4 * (hidden_size // SCALE_BLOCK)
    return hidden_size * _ELEMENT_BYTES[datatype]


def fp8_rows(data: Buffer | Span, scales: Buffer | Span, num_tokens: int) -> bytes:
    """The rows of e4m3 values [num_tokens, H] and their fp32 scales [num_tokens, H/128], on the host."""
    parts = [np.frombuffer(host_view(each), np.uint8).reshape(num_tokens, -1) for each in (data, scales)]
    return np.concatenate(parts, axis=1).tobytes()


def zero_request(num_tokens: int, hidden_size: int) -> LayerRequest:
    """A request of zeros, for checking that a layer computes."""
    return LayerRequest(num_tokens, bytes(num_tokens * hidden_size * 4), "FP32", None, "INT32", None, "FP32")


@dataclass(slots=True)  # not frozen: that takes a microsecond longer in every step
class StepResult:
    """A step's result: each request's rows [num_tokens, H] in its output_datatype, and what metrics need.

    An output is the request's own `output`, or else bytes. `empty_slots`: how many slots name no expert, if
    the layer is a part; in a whole one they are those that no expert has computed.
    """

    outputs: list[OutputMemory]
    layout: Layout
    num_tokens: int
    count_tokens: Callable[[], NDArray[np.integer[Any]]]
    compute_seconds: float
    empty_slots: int = 0

    @property
    def tokens_per_expert(self) -> NDArray[np.integer[Any]]:
        """Tokens of each of the layer's experts that are held here; counted when it is asked for."""
        return self.count_tokens()
