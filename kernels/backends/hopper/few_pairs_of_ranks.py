"""Launches csrc/few_pairs_of_ranks.cu: the permutation of all ranks' pairs, if they are few."""

import numpy as np
from torch import Tensor

from expertd.kernels.backends.hopper.compute_permutation import FEW_PAIRS, DevicePermutation
from expertd.kernels.backends.hopper.launch import Grid, Kernels, named_source
from expertd.kernels.backends.hopper.rank_grids import place_bytes
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.jit import Variant
from expertd.kernels.rank_memory import RankMemory, RankTokens

VARIANT = Variant(named_source("few_pairs_of_ranks", FEW_PAIRS=FEW_PAIRS), FEW_PAIRS, place_bytes)


def few_pairs_of_ranks(
    kernels: Kernels,
    on: OnStream,
    memory: RankMemory,
    tokens: RankTokens,
    topk_ids: Tensor,
    topk_weights: Tensor,
    permutation: DevicePermutation,
    offsets_copy: Tensor | None,
) -> None:
    """Write the permutation of at most FEW_PAIRS pairs; see `permutation_of_ranks`."""
    places, top_k, num_groups = tokens.places, topk_ids.shape[1], permutation.offsets.numel() - 1
    kernels.launch(
        on, VARIANT, Grid(1, 1, place_bytes(places.numel())),
        topk_ids, topk_weights, np.int32(topk_ids.numel()), np.int32(tokens.first(memory.rank) * top_k),
        places, np.int32(places.numel()), memory.ranks, memory.consumed, *tokens.packed,
        np.int32(permutation.inverse.numel()), np.int32(top_k), np.int32(num_groups),
        permutation.inverse, permutation.offsets, offsets_copy, permutation.tile_counters,
    )  # fmt: skip
