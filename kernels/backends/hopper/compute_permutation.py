"""Launches csrc/compute_permutation.cu: the permutation that sorts (token, slot) pairs by group."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, OnStream, Variant, named_source
from expertd.kernels.backends.hopper.rank_grids import place_bytes
from expertd.kernels.rank_memory import RankMemory, RankTokens

FEW_PAIRS = 128
"""Up to this many pairs, each is compared with all others."""
_MANY_PAIRS = 8192
"""Of all ranks; with more, `dispatch_rows` begins after a rank's own are sent, and runs on other SMs."""
_SM_BYTES = 225 * 1024  # of shared memory: no other CTA fits beside
_ONE_CTA_PAIRS = 1024  # up to this many pairs, one CTA is faster than a cluster
_CLUSTER = 8
_CLUSTER_SMS = 64  # from this many SMs on, enough of them share a GPC for a cluster


def _shared_bytes(num_groups: int) -> int:
    return 33 * num_groups * 4  # a counter per group for each of 32 warps, and for their sum


def _shared_bytes_of_ranks(num_experts: int) -> int:
    return max(_SM_BYTES, place_bytes(num_experts) + _shared_bytes(num_experts))


def _variant(suffix: str, shared_bytes: Callable[[int], int], **defines: int) -> Variant:
    source = named_source(
        "compute_permutation", suffix, FEW_PAIRS=FEW_PAIRS, MANY_PAIRS=_MANY_PAIRS, **defines
    )
    return Variant(source, 1024, shared_bytes)


VARIANT = _variant("", _shared_bytes, RANKS=0)
OF_RANKS = _variant("ranks", _shared_bytes_of_ranks, RANKS=1)


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
    zero = np.int32(0)
    _launch(
        kernels, on, VARIANT, placement, num_sms, offsets_copy, 0,
        group_ids, None, zero, zero, None, zero, None, None, None,
    )  # fmt: skip
    return placement


def permutation_of_ranks(
    kernels: Kernels,
    on: OnStream,
    memory: RankMemory,
    tokens: RankTokens,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_groups: int,
    num_sms: int | None,
    offsets_copy: Tensor | None = None,
) -> Placement:
    """As `compute_permutation`, for the pairs of all ranks: each sends its own, and waits for all.

    topk_ids      int32 [t, top_k] of this rank's tokens; others than experts name none
    topk_weights  fp32 [t, top_k]
    """
    top_k, places = topk_ids.shape[1], tokens.places
    placement = _empty((tokens.num_tokens, top_k), num_groups, places.device)
    first_pair = sum(tokens.counts[: memory.rank]) * top_k
    _launch(
        kernels, on, OF_RANKS, placement, num_sms, offsets_copy, place_bytes(places.numel()),
        topk_ids, topk_weights, np.int32(topk_ids.numel()), np.int32(first_pair),
        places, np.int32(places.numel()), memory.ranks, memory.consumed, tokens.first_tokens,
    )  # fmt: skip
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
    variant: Variant,
    placement: Placement,
    num_sms: int | None,
    offsets_copy: Tensor | None,
    more_shared_bytes: int,
    *given: object,
) -> None:
    (num_tokens, top_k), num_groups = placement.inverse.shape, placement.offsets.numel() - 1
    num_pairs = num_tokens * top_k
    one_cta = num_pairs <= _ONE_CTA_PAIRS or (num_sms is not None and num_sms < _CLUSTER_SMS)
    shared_bytes = more_shared_bytes + (0 if num_pairs <= FEW_PAIRS else _shared_bytes(num_groups))
    if variant is OF_RANKS and num_pairs > _MANY_PAIRS and not one_cta:
        shared_bytes = max(_SM_BYTES, shared_bytes)
    kernels.launch(
        on, variant, Grid(1, 1 if one_cta else _CLUSTER, shared_bytes), *given,
        np.int32(num_pairs), np.int32(top_k), np.int32(num_groups),
        placement.inverse, placement.offsets, offsets_copy, placement.tile_counters,
    )  # fmt: skip
