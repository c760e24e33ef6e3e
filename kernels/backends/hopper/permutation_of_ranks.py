"""Launches csrc/permutation_of_ranks.cu: the permutation that sorts the pairs of all ranks by group."""

import math

import numpy as np
from torch import Tensor

from expertd.kernels.backends.hopper.compute_permutation import (
    FEW_PAIRS,
    THREADS,
    DevicePermutation,
    runs_cluster,
)
from expertd.kernels.backends.hopper.few_pairs_of_ranks import few_pairs_of_ranks
from expertd.kernels.backends.hopper.launch import Grid, Kernels, named_source
from expertd.kernels.backends.hopper.rank_grids import place_bytes
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.jit import Variant
from expertd.kernels.rank_memory import MAX_SEGMENTS, RankMemory, RankTokens
from expertd.limits import MAX_GROUPS

_MANY_PAIRS = 8192
"""Pairs of all ranks; with more, `dispatch_rows` begins after those of a rank are sent, on other SMs."""
_ONE_CTA_PAIRS = 1024
"""Pairs of all ranks; up to this many, one CTA is faster than a cluster."""
_FEWEST_SEGMENTS = 4  # of a rank: the kernel reads the counts of four at once
_WARPS = 32  # of a CTA
_SM_BYTES = 225 * 1024  # of shared memory: no other CTA fits beside


def _expert_bytes(num_experts: int) -> int:
    return place_bytes(num_experts) + 4 * _WARPS * num_experts  # a counter for each warp


def _group_bytes(all_segment_bits: int) -> int:
    return 4 * ((1 << all_segment_bits) + 1)  # a number for each segment, and one more


def _max_groups(num_ranks: int, num_experts: int) -> int:
    # With as many segments as a rank can have: a layer's calls do not depend on their tokens.
    all_segment_bits = _bits(num_ranks * MAX_SEGMENTS)
    return min(MAX_GROUPS, (_SM_BYTES - _expert_bytes(num_experts)) // _group_bytes(all_segment_bits))


def _bits(count: int) -> int:
    return (count - 1).bit_length()


def _max_shared_bytes(num_experts: int) -> int:
    return _SM_BYTES


def _variant(pairs_of_lane: int) -> Variant:
    source = named_source(
        "permutation_of_ranks", f"{pairs_of_lane}",
        AT_ONCE=pairs_of_lane, MANY_PAIRS=_MANY_PAIRS, SEGMENTS=MAX_SEGMENTS,
    )  # fmt: skip
    return Variant(source, THREADS, _max_shared_bytes)


_BY_PAIRS_OF_LANE = {pairs: _variant(pairs) for pairs in (1, 4)}

VARIANTS = tuple(_BY_PAIRS_OF_LANE.values())


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
) -> DevicePermutation:
    """As `compute_permutation`, for the pairs of all ranks: each sends its own, and waits for all.

    topk_ids      int32 [t, top_k] of this rank's tokens; others than experts name none
    topk_weights  fp32 [t, top_k]
    """
    top_k, places = topk_ids.shape[1], tokens.places
    permutation = DevicePermutation.empty((tokens.num_tokens, top_k), num_groups, places.device)
    num_pairs, num_own, num_experts = permutation.inverse.numel(), topk_ids.numel(), places.numel()
    max_groups = _max_groups(memory.num_ranks, num_experts)
    if not 1 <= num_groups <= max_groups:
        expected = f"1 to {max_groups} with {num_experts} experts on {memory.num_ranks} ranks"
        raise ValueError(f"num_groups: expected {expected}, got {num_groups}")
    if num_pairs <= FEW_PAIRS:
        few_pairs_of_ranks(kernels, on, memory, tokens, topk_ids, topk_weights, permutation, offsets_copy)
        return permutation
    is_small = num_pairs <= _ONE_CTA_PAIRS
    segments = _FEWEST_SEGMENTS if is_small else MAX_SEGMENTS  # the same on all ranks
    segment_bits, all_segment_bits = _bits(segments), _bits(memory.num_ranks * segments)
    shared_bytes = _expert_bytes(num_experts) + num_groups * _group_bytes(all_segment_bits)
    # The SMs of a cluster with many pairs to itself: no other CTA fits beside.
    cluster = Grid(1, segments, _SM_BYTES if num_pairs > _MANY_PAIRS else shared_bytes)
    one_cta = is_small or not runs_cluster(kernels, on, _BY_PAIRS_OF_LANE[4], cluster, num_sms)
    grid = Grid(1, 1, shared_bytes) if one_cta else cluster
    num_ctas = grid.cluster
    pairs_of_cta = math.ceil(num_own / num_ctas)
    pairs_of_lane = 1 if num_pairs <= num_ctas * THREADS else 4
    chunk = 32 * pairs_of_lane
    pairs_of_warp = max(1, math.ceil(pairs_of_cta / (_WARPS * chunk))) * chunk
    kernels.launch(
        on, _BY_PAIRS_OF_LANE[pairs_of_lane], grid,
        topk_ids, topk_weights, np.int32(num_own), np.int32(tokens.first(memory.rank) * top_k),
        np.int32(pairs_of_cta), np.int32(pairs_of_warp),
        places, np.int32(num_experts), memory.ranks, memory.consumed, *tokens.packed,
        np.int32(segment_bits), np.int32(all_segment_bits),
        np.int32(num_pairs), np.int32(top_k), np.int32(num_groups),
        permutation.inverse, permutation.offsets, offsets_copy, permutation.tile_counters,
    )  # fmt: skip
    return permutation
