"""The requests of one step, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from expertd.kernels import expand_rows
from expertd.service.moe.request import FP8, LayerRequest, row_bytes

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
    def dtype(self) -> torch.dtype:
        """The dtype in which the layer gets all hidden states; float32 if they differ, and for FP8."""
        return _common({request.datatype for request in self.requests})

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of all outputs; float32 if they differ."""
        return _common({request.output_datatype for request in self.requests})


def _common(datatypes: set[str]) -> torch.dtype:
    return FLOATS.get(datatypes.pop(), torch.float32) if len(datatypes) == 1 else torch.float32


def rows_of(data: Tensor, datatype: str, hidden_size: int) -> Tensor:
    """uint8 bytes, contiguous, as rows [T, H] of `datatype`; FP8 stays uint8 [T, row_bytes]."""
    if datatype == FP8:
        return data.view(-1, row_bytes(FP8, hidden_size))
    return data.view(FLOATS[datatype]).view(-1, hidden_size)


def expanded(rows: Tensor, hidden_size: int) -> Tensor:
    """Rows of `rows_of` as floats [T, H]."""
    if rows.dtype != torch.uint8:
        return rows
    data, scales = rows[:, :hidden_size].contiguous(), rows[:, hidden_size:].contiguous()
    return expand_rows(data.view(torch.float8_e4m3fn), scales.view(torch.float32))
