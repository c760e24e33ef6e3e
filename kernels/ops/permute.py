"""The order that puts the rows of one expert together."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GroupOrder:
    """The T*k (token, slot) pairs sorted by group, pairs of one group in the tokens' order.

    tokens   int64 [T*k], the token of each sorted row
    groups   int32 [T*k], its group
    rows     int64 [T, k], the sorted row of each pair
    offsets  int32 [G+1], group g owning sorted rows offsets[g]:offsets[g+1]; those past the last, none
    """

    tokens: Tensor
    groups: Tensor
    rows: Tensor
    offsets: Tensor

    @property
    def counts(self) -> Tensor:
        """int32 [G], rows of each group."""
        return self.offsets.diff()

    @property
    def positions(self) -> Tensor:
        """int64 [T*k], the place of each sorted row among its group's."""
        return torch.arange(self.tokens.numel(), device=self.tokens.device) - self.offsets[self.groups]


def sort_by_group(group_ids: Tensor, num_groups: int) -> GroupOrder:
    """Order the pairs of group_ids int32 [T, k], 0 to num_groups (which is no group), without a host sync."""
    top_k = group_ids.shape[1]
    groups, pairs = group_ids.flatten().sort(stable=True)
    rows = torch.empty_like(pairs)
    rows[pairs] = torch.arange(pairs.numel(), device=pairs.device)
    bounds = torch.arange(num_groups + 1, dtype=torch.int32, device=groups.device)
    offsets = torch.searchsorted(groups, bounds, out_int32=True)
    return GroupOrder(pairs // top_k, groups, rows.view(group_ids.shape), offsets)
