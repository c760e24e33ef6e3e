"""Launches csrc/compute_permutation.cu: the permutation that sorts (token, slot) pairs by group."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, OnStream, Variant, named_source
from expertd.kernels.rank_memory import RankMemory, RankTokens

FEW_PAIRS = 128
"""Up to this many pairs, each is compared with all others."""
_ONE_CTA_PAIRS = 1024  # up to this many pairs, one CTA is faster than a cluster
_CLUSTER = 8
_CLUSTER_SMS = 64  # from this many SMs on, enough of them share a GPC for a cluster


def _shared_bytes(num_groups: int) -> int:
    return 33 * num_groups * 4  # a counter per group for each of 32 warps, and for their sum


VARIANT = Variant(named_source("compute_permutation", FEW_PAIRS=FEW_PAIRS), 1024, _shared_bytes)


class Placement(NamedTuple):
    """The permutation as kernels need it, and the tile counters of the GEMMs on the permuted rows.

    inverse        int32 [T, top_k], the permuted row of each pair, -1 for a pair without a group
    offsets        int32 [G + 1]: group g owns permuted rows offsets[g]:offsets[g + 1]
    tile_counters  int32 [2, 2] of zeros, for two GEMMs
    """

    inverse: Tensor
    offsets: Tensor
    tile_counters: Tensor


def compute_permutation(
    kernels: Kernels,
    on: OnStream,
    group_ids: Tensor,
    num_groups: int,
    num_sms: int | None,
    offsets_copy: Tensor | None = None,
) -> Placement:
    """The placement of group_ids int32 [T, top_k]; an id outside 0 to num_groups - 1 names no group.

    offsets_copy  where to write the offsets as well: int32 [G + 1], pinned
    """
    placement = _empty(group_ids.shape, num_groups, group_ids.device)
    _launch(kernels, on, placement, num_sms, offsets_copy, group_ids, None, None)
    return placement


def permutation_of_ranks(
    kernels: Kernels,
    on: OnStream,
    memory: RankMemory,
    tokens: RankTokens,
    top_k: int,
    num_groups: int,
    num_sms: int | None,
    offsets_copy: Tensor | None = None,
) -> Placement:
    """As `compute_permutation`, for the pairs of all ranks, for which it waits on the device."""
    placement = _empty((tokens.num_tokens, top_k), num_groups, tokens.places.device)
    _launch(kernels, on, placement, num_sms, offsets_copy, None, memory.ranks, tokens.first_tokens)
    return placement


def _empty(size: Sequence[int], num_groups: int, device: torch.device) -> Placement:
    return Placement(
        torch.empty(size, dtype=torch.int32, device=device),
        torch.empty(num_groups + 1, dtype=torch.int32, device=device),
        torch.empty((2, 2), dtype=torch.int32, device=device),
    )


def _launch(
    kernels: Kernels,
    on: OnStream,
    placement: Placement,
    num_sms: int | None,
    offsets_copy: Tensor | None,
    group_ids: Tensor | None,
    ranks: Tensor | None,
    first_tokens: Tensor | None,
) -> None:
    num_pairs, num_groups = placement.inverse.numel(), placement.offsets.numel() - 1
    one_cta = num_pairs <= _ONE_CTA_PAIRS or (num_sms is not None and num_sms < _CLUSTER_SMS)
    shared_bytes = 0 if num_pairs <= FEW_PAIRS else VARIANT.shared_bytes(num_groups)
    kernels.launch(
        on, VARIANT, Grid(1, 1 if one_cta else _CLUSTER, shared_bytes),
        group_ids, ranks, first_tokens,
        np.int32(num_pairs), np.int32(placement.inverse.shape[1]), np.int32(num_groups),
        placement.inverse, placement.offsets, offsets_copy, placement.tile_counters,
    )  # fmt: skip
