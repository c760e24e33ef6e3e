"""The order that puts the rows of one expert together."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertOrder:
    """The T*k (token, slot) pairs sorted by expert, pairs of one expert in the tokens' order.

    tokens   int64 [T*k], the token of each sorted row
    experts  int32 [T*k], its expert
    rows     int64 [T, k], the sorted row of each pair
    offsets  int32 [E+1], expert e owning sorted rows offsets[e]:offsets[e+1]
    """

    tokens: Tensor
    experts: Tensor
    rows: Tensor
    offsets: Tensor

    @property
    def counts(self) -> Tensor:
        """int32 [E], rows of each expert."""
        return self.offsets.diff()

    @property
    def positions(self) -> Tensor:
        """int64 [T*k], the place of each sorted row among its expert's."""
        return torch.arange(self.tokens.numel(), device=self.tokens.device) - self.offsets[self.experts]


def sort_by_expert(topk_ids: Tensor, num_experts: int) -> ExpertOrder:
    """Order the pairs of topk_ids int32 [T, k], every id from 0 to num_experts - 1, without a host sync."""
    top_k = topk_ids.shape[1]
    experts, pairs = topk_ids.flatten().sort(stable=True)
    rows = torch.empty_like(pairs)
    rows[pairs] = torch.arange(pairs.numel(), device=pairs.device)
    bounds = torch.arange(num_experts + 1, dtype=torch.int32, device=experts.device)
    offsets = torch.searchsorted(experts, bounds, out_int32=True)
    return ExpertOrder(pairs // top_k, experts, rows.view(topk_ids.shape), offsets)
