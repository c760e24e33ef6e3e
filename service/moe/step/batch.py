"""The requests of one step, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd.kernels import HiddenStates, Quantized, quantize_rows
from expertd.service.moe.request import FP8, LayerRequest, row_bytes
from expertd.service.moe.shape import LayerShape

FLOATS = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}


@dataclass(frozen=True)
class Batch:
    """Requests in the order of their tokens in the step."""

    requests: Sequence[LayerRequest]

    @cached_property
    def parts(self) -> list[slice]:
        """Each request's tokens."""
        bounds = accumulate((request.num_tokens for request in self.requests), initial=0)
        return [slice(begin, end) for begin, end in pairwise(bounds)]

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)

    @property
    def with_routing(self) -> list[slice]:
        """The tokens of the requests that supply routing."""
        return [
            part
            for request, part in zip(self.requests, self.parts, strict=True)
            if request.topk_ids is not None
        ]

    @property
    def needs_router(self) -> bool:
        """Whether there are requests without routing."""
        return len(self.with_routing) < len(self.requests)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the layer gets all hidden states; float32 if they differ, and for FP8."""
        return _common({request.datatype for request in self.requests})

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of all outputs; float32 if they differ."""
        return _common({request.output_datatype for request in self.requests})


def count_named(shape: LayerShape, topk_ids: Tensor, offsets: Tensor) -> None:
    """Write to the last of a step's offsets how many slots name an expert, if the layer is a part.

    A whole layer's groups have all such slots, and the offsets before it count them. For `empty_slots`.

    topk_ids  int32 [T, top_k]: experts, or -1
    """
    if shape.is_part:
        offsets[-1:].copy_((topk_ids >= 0).sum(dtype=torch.int32).view(1), non_blocking=True)


def empty_slots(shape: LayerShape, num_tokens: int, routed: bool, offsets: NDArray[np.int32]) -> int:
    """The `StepResult.empty_slots` of a step; routed: the layer has routed all tokens."""
    return num_tokens * shape.top_k - int(offsets[-1]) if shape.is_part and not routed else 0


def _common(datatypes: set[str]) -> torch.dtype:
    return FLOATS.get(datatypes.pop(), torch.float32) if len(datatypes) == 1 else torch.float32


def rows_of(data: Tensor, datatype: str, hidden_size: int, scales: Tensor | None = None) -> HiddenStates:
    """uint8 bytes, contiguous, as rows [T, H] of `datatype`. `scales`: those of FP8 rows without them."""
    if datatype != FP8:
        return data.view(FLOATS[datatype]).view(-1, hidden_size)
    if scales is None:
        rows = data.view(-1, row_bytes(FP8, hidden_size))
        data, scales = rows[:, :hidden_size], rows[:, hidden_size:]
    else:
        data, scales = data.view(-1, hidden_size), scales.view(-1, row_bytes(FP8, hidden_size) - hidden_size)
    return Quantized(data.view(torch.float8_e4m3fn), scales.view(torch.float32))


def joined(parts: Sequence[HiddenStates]) -> Quantized:
    """Rows one after another, floats among them as the quantizer rounds them."""
    made = [quantize_rows(part) if isinstance(part, Tensor) else part for part in parts]
    data = torch.cat([part.data.view(torch.uint8) for part in made])
    return Quantized(data.view(torch.float8_e4m3fn), torch.cat([part.scales for part in made]))
