"""The requests of one step, side by side."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch

from expertd.service.moe.request import LayerRequest

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
        """The dtype of all hidden states; float32 if they differ."""
        return _common({request.datatype for request in self.requests})

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of all outputs; float32 if they differ."""
        return _common({request.output_datatype for request in self.requests})


def _common(datatypes: set[str]) -> torch.dtype:
    return FLOATS[datatypes.pop()] if len(datatypes) == 1 else torch.float32
