"""Launches csrc/dispatch_rows.cu: a rank's tokens, quantized, to the ranks that hold their experts."""

import numpy as np
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, OnStream, variants_by_dtype
from expertd.kernels.backends.hopper.rank_grids import ctas, parts, place_bytes

_BY_DTYPE = variants_by_dtype("dispatch_rows", 128, place_bytes)
_CTAS = 8  # per SM at most: leaves room for the launches that take the tokens

VARIANTS = tuple(_BY_DTYPE.values())


def dispatch_rows(
    kernels: Kernels,
    on: OnStream,
    ranks: Tensor,
    places: Tensor,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    first_token: int,
    num_sms: int | None,
    *,
    tokens_are_ready: bool = False,
) -> None:
    """Quantize this rank's tokens [t, H], and write each to the ranks that hold its experts.

    places int32 [E], rank * 65536 + group of each expert; first_token: this rank's, among those of all ranks.
    tokens_are_ready: hidden_states were complete before the preceding launch began.
    """
    num_tokens, h = hidden_states.shape
    grid = Grid(ctas(on, num_sms, _CTAS, num_tokens * parts(h)), 1, place_bytes(places.numel()))
    kernels.launch(
        on, _BY_DTYPE[hidden_states.dtype], grid,
        ranks, places, np.int32(places.numel()), hidden_states, topk_ids, topk_weights,
        np.int32(num_tokens), np.int32(topk_ids.shape[1]), np.int32(h),
        np.int32(first_token), np.int32(tokens_are_ready),
    )  # fmt: skip
