"""Launches csrc/combine_rows.cu: what ranks have computed goes back to tokens' ranks, and is added up."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, variants_by_dtype
from expertd.kernels.backends.hopper.rank_grids import COLUMNS, ctas, ctas_per_token, place_bytes
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.jit import Variant
from expertd.kernels.rank_memory import RankMemory, RankTokens


class _CombineVariant(NamedTuple):
    """One variant to combine.

    by_dtype      the variants, by the dtype of the result
    ctas          per SM at most
    columns       of a token, by a CTA at once
    shared_bytes  of a CTA, by the number of experts
    """

    by_dtype: dict[torch.dtype, Variant]
    ctas: int
    columns: int
    shared_bytes: Callable[[int], int]


def _variant(
    prefix: str,
    threads: int,
    ctas: int,
    columns: int = COLUMNS,
    storage_bytes: int = 0,
    **defines: int,
) -> _CombineVariant:
    """Its definitions; storage_bytes: of shared memory, besides a copy of places."""
    defines = {"EXACT": 0, "STAGED": 0, "BIASED": 0} | defines

    def shared_bytes(num_experts: int) -> int:
        return storage_bytes + place_bytes(num_experts)

    by_dtype = variants_by_dtype(
        "combine_rows", threads, shared_bytes, prefix,
        CTAS=ctas, THREADS=threads, COLUMNS=columns, STORAGE_BYTES=storage_bytes, **defines,
    )  # fmt: skip
    return _CombineVariant(by_dtype, ctas, columns, shared_bytes)


_SUMS = _variant("", 256, ctas=4)
_EXACT = _variant("exact_", 256, ctas=3, EXACT=1)
_BIASED_SUMS = _variant("biased_", 256, ctas=4, BIASED=1)
_BIASED_EXACT = _variant("biased_exact_", 256, ctas=3, EXACT=1, BIASED=1)
# Two stages of four entries, two results, and a row of nothing; two barriers.
_STAGED = _variant(
    "staged_", 32, ctas=8, columns=1024, storage_bytes=(2 * 4 * 2 + 2 * 4 + 2) * 1024 + 16, STAGED=1
)
STAGED_TOKENS = 512
"""From this number of tokens of a rank on, staging is faster, if rows are wide."""
_STAGED_COLUMNS = 2048  # from this width on

_COMBINE_VARIANTS = _SUMS, _STAGED, _EXACT, _BIASED_SUMS, _BIASED_EXACT
VARIANTS = tuple(variant for each in _COMBINE_VARIANTS for variant in each.by_dtype.values())


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
    columns: range | None = None,
    bias: Tensor | None = None,
) -> None:
    """Write out [t, N]: the sums of all ranks' rows for this rank's tokens; see `RankMemory.exact`.

    topk_ids int32, topk_weights fp32 [t, top_k]; rows bf16 [R, N]; inverse [T, top_k] of all ranks' tokens.
    columns: those to write, bounded by multiples of 8; None: all. Launches for other columns of the same call
    must run one after another; the one with the last columns ends it. bias: bf16 [E, N] of all ranks'
    experts, added to each row of an expert before it is weighted; None: nothing is.
    """
    top_k, n, places = inverse.shape[1], rows.shape[1], tokens.places
    max_rank_tokens, columns, num_experts = max(tokens.counts), columns or range(n), places.numel()
    is_staged = max_rank_tokens >= STAGED_TOKENS and n >= _STAGED_COLUMNS
    if bias is not None:
        variant = _BIASED_EXACT if memory.exact else _BIASED_SUMS
    else:
        variant = _EXACT if memory.exact else _STAGED if is_staged else _SUMS
    shared_bytes = variant.shared_bytes(num_experts)
    # A CTA waits for rows that later CTAs of other ranks return: all of a launch must run at once.
    per_sm = min(variant.ctas, kernels.ctas_per_sm(on.device, variant.by_dtype[out.dtype], shared_bytes))
    num_ctas = ctas(on, num_sms, per_sm, tokens.counts, len(columns), variant.columns)
    sharing = ctas_per_token(num_ctas, tokens.counts, len(columns), variant.columns)
    kernels.launch(
        on, variant.by_dtype[out.dtype], Grid(num_ctas, 1, shared_bytes),
        memory.ranks, *tokens.packed, places, np.int32(num_experts), topk_ids, topk_weights,
        rows, inverse, np.int32(max_rank_tokens), np.int32(sharing), memory.combine_counters,
        np.int32(top_k), np.int32(n), np.int32(columns.start), np.int32(columns.stop), bias, out,
    )  # fmt: skip
