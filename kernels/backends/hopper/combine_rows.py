"""Launches csrc/combine_rows.cu: what ranks have computed goes back to tokens' ranks, and is added up."""

import numpy as np
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, OnStream, variants_by_dtype
from expertd.kernels.backends.hopper.rank_grids import ctas, place_bytes
from expertd.kernels.rank_memory import RankMemory, RankTokens

_SUMS_CTAS, _EXACT_CTAS = 4, 3  # per SM at most: as many as run at once
_SUMS = variants_by_dtype("combine_rows", 256, place_bytes, EXACT=0, CTAS=_SUMS_CTAS)
_EXACT = variants_by_dtype("combine_rows", 256, place_bytes, "exact_", EXACT=1, CTAS=_EXACT_CTAS)

VARIANTS = (*_SUMS.values(), *_EXACT.values())


def combine_rows(
    kernels: Kernels,
    on: OnStream,
    memory: RankMemory,
    tokens: RankTokens,
    topk_ids: Tensor,
    topk_weights: Tensor,
    rows: Tensor,
    inverse: Tensor,
    out: Tensor,
    num_sms: int | None,
) -> None:
    """Write out [t, N]: the sums of all ranks' rows for this rank's tokens; see `RankMemory.exact`.

    topk_ids int32, topk_weights fp32 [t, top_k]; rows bf16 [R, N]; inverse [T, top_k] of all ranks' tokens.
    """
    top_k, n, places = inverse.shape[1], rows.shape[1], tokens.places
    by_dtype, per_sm = (_EXACT, _EXACT_CTAS) if memory.exact else (_SUMS, _SUMS_CTAS)
    num_ctas = ctas(on, num_sms, per_sm, tokens.counts, n)
    kernels.launch(
        on, by_dtype[out.dtype], Grid(num_ctas, 1, place_bytes(places.numel())),
        memory.ranks, tokens.first_tokens, places, np.int32(places.numel()), topk_ids, topk_weights,
        rows, inverse, np.int32(max(tokens.counts)), np.int32(top_k), np.int32(n), out,
    )  # fmt: skip
