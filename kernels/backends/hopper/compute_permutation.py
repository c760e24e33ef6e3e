"""Launches csrc/compute_permutation.cu: the permutation that sorts (token, slot) pairs by group."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, named_source
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.jit import Variant
from expertd.kernels.ops.parts import GroupTable

FEW_PAIRS = 128
"""Up to this many pairs, each is compared with all others."""
THREADS = 1024
_ONE_CTA_PAIRS = 1024  # up to this many pairs, one CTA is faster than a cluster
_CLUSTER = 8


def _shared_bytes(num_groups: int) -> int:
    return 33 * num_groups * 4  # a counter per group for each of 32 warps, and for their sum


def _variant(suffix: str, looks_up: bool) -> Variant:
    defines = {"FEW_PAIRS": FEW_PAIRS, "LOOKS_UP": str(looks_up).lower()}
    return Variant(named_source("compute_permutation", suffix, **defines), THREADS, _shared_bytes)


VARIANT, LOOKS_UP = _variant("", False), _variant("looks_up", True)


class DevicePermutation(NamedTuple):
    """The permutation as kernels need it, and the tile counters of the GEMMs on the permuted rows.

    inverse        int32 [T, top_k], the permuted row of each pair, -1 for a pair without a group
    offsets        int32 [G + 1]: group g owns permuted rows offsets[g]:offsets[g + 1]
    tile_counters  int32 [2, 2] of zeros, for two GEMMs
    """

    inverse: Tensor
    offsets: Tensor
    tile_counters: Tensor

    @classmethod
    def empty(cls, size: Sequence[int], num_groups: int, device: torch.device) -> "DevicePermutation":
        """To be written, for topk_ids of this size."""
        return cls(
            torch.empty(size, dtype=torch.int32, device=device),
            torch.empty(num_groups + 1, dtype=torch.int32, device=device),
            torch.empty((2, 2), dtype=torch.int32, device=device),
        )


def runs_cluster(kernels: Kernels, on: OnStream, variant: Variant, grid: Grid, num_sms: int | None) -> bool:
    """Whether a launch limited to `num_sms` can be a cluster, whose CTAs run at once on SMs of one GPC."""
    return (num_sms is None or num_sms >= grid.cluster) and kernels.has_room(on, variant, grid)


def compute_permutation(
    kernels: Kernels,
    on: OnStream,
    group_ids: Tensor,
    num_groups: int,
    num_sms: int | None,
    offsets_copy: Tensor | None = None,
    table: GroupTable | None = None,
) -> DevicePermutation:
    """The permutation of group_ids int32 [T, top_k]; an id outside 0 to num_groups - 1 names no group.

    offsets_copy  where to write the offsets as well: int32 [G + 1], pinned
    table         finds the groups of group_ids, which are other ids then; None: they are groups
    """
    variant = VARIANT if table is None else LOOKS_UP
    groups, seen = (None, None) if table is None else table
    permutation = DevicePermutation.empty(group_ids.shape, num_groups, group_ids.device)
    num_pairs = group_ids.numel()
    grid = Grid(1, _CLUSTER, 0 if num_pairs <= FEW_PAIRS else _shared_bytes(num_groups))
    if num_pairs <= _ONE_CTA_PAIRS or not runs_cluster(kernels, on, variant, grid, num_sms):
        grid = grid._replace(cluster=1)
    kernels.launch(
        on, variant, grid,
        group_ids, np.int32(num_pairs), np.int32(num_groups),
        permutation.inverse, permutation.offsets, offsets_copy, permutation.tile_counters,
        groups, np.int32(0 if groups is None else len(groups)), seen,
    )  # fmt: skip
    return permutation
