"""Computes and applies the permutation that brings the rows of each group together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from expertd.kernels.ops.checks import check_group_ids, check_permute
from expertd.kernels.ops.quantize import Quantized


@dataclass(frozen=True)
class Permutation:
    """The T * top_k (token, slot) pairs sorted by group, and by token within a group.

    token_ids  int64 [T * top_k], the token of each permuted row
    group_ids  int32 [T * top_k], its group
    inverse    int64 [T, top_k], the permuted row of each pair
    offsets    int32 [G + 1]: group g owns permuted rows offsets[g]:offsets[g + 1]; rows past the last offset
               belong to no group, which is number G in group_ids
    absent     bool [T, top_k], the pairs without a group; None: none is known to be
    """

    token_ids: Tensor
    group_ids: Tensor
    inverse: Tensor
    offsets: Tensor
    absent: Tensor | None

    @property
    def counts(self) -> Tensor:
        """int32 [G], rows of each group."""
        return self.offsets.diff()

    @property
    def positions(self) -> Tensor:
        """int64 [T * top_k], the position of each permuted row within its group."""
        rows = torch.arange(self.token_ids.numel(), device=self.token_ids.device)
        return rows - self.offsets[self.group_ids]


def write_no_rows(offsets: Tensor, device: torch.device) -> None:
    """Write the offsets of groups without rows, after earlier work on the device's stream.

    offsets  int32 [G + 1], also in pinned memory, which earlier work may still be writing to
    """
    offsets.copy_(torch.zeros_like(offsets, device=device), non_blocking=True)


def compute_permutation(group_ids: Tensor, num_groups: int) -> Permutation:
    """The permutation of group_ids int32 [T, top_k]; an id outside 0 to num_groups - 1 names no group.

    Does not wait for a GPU. Raises ValueError (name, expected, got).
    """
    check_group_ids(group_ids, num_groups)
    top_k, absent = group_ids.shape[1], None
    # Usually none is. On a CPU checking is cheaper than masking; on a GPU it would wait for the device.
    if not group_ids.is_cpu or not _are_inside(group_ids, num_groups):
        absent = (group_ids < 0) | (group_ids >= num_groups)
        group_ids = group_ids.masked_fill(absent, num_groups)
    sorted_ids, pairs = group_ids.flatten().sort(stable=True)
    inverse = torch.empty_like(pairs)
    inverse[pairs] = torch.arange(pairs.numel(), device=pairs.device)
    bounds = torch.arange(num_groups + 1, dtype=torch.int32, device=sorted_ids.device)
    offsets = torch.searchsorted(sorted_ids, bounds, out_int32=True)
    return Permutation(pairs // top_k, sorted_ids, inverse.view(group_ids.shape), offsets, absent)


def _are_inside(group_ids: Tensor, num_groups: int) -> bool:
    return group_ids.numel() == 0 or (int(group_ids.min()) >= 0 and int(group_ids.max()) < num_groups)


@torch.no_grad()
def permute_rows(rows: Quantized, token_ids: Tensor) -> Quantized:
    """The quantized rows [T, K] at token_ids, int64 or int32 [R]: [R, K], its scales column-major again.

    Has no gradients. Raises ValueError (name, expected, got).
    """
    check_permute(rows, token_ids)
    data = rows.data.contiguous()
    if data.storage_offset() % 8 or data.data_ptr() % 8:
        data = data.clone()
    words = data.view(torch.int64)  # copied eight elements at a time
    data = words.index_select(0, token_ids).view(torch.float8_e4m3fn)
    return Quantized(data, rows.scales.t().index_select(1, token_ids).t())
