"""Launches csrc/add_ranks.cu: the sum of what all ranks have returned for a rank's tokens."""

import numpy as np
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, OnStream, variants_by_dtype
from expertd.kernels.backends.hopper.rank_grids import ctas, parts, place_bytes

_BY_DTYPE = variants_by_dtype("add_ranks", 256, place_bytes)
_CTAS = 2  # per SM at most: they run beside those of return_rows

VARIANTS = tuple(_BY_DTYPE.values())


def add_ranks(
    kernels: Kernels,
    on: OnStream,
    ranks: Tensor,
    places: Tensor,
    topk_ids: Tensor,
    out: Tensor,
    num_sms: int | None,
) -> None:
    """Write out [t, N]: the sums that the ranks have returned for this rank's tokens."""
    num_tokens, n = out.shape
    num_ctas = ctas(on, num_sms, _CTAS, num_tokens * parts(n))
    kernels.launch(
        on, _BY_DTYPE[out.dtype], Grid(num_ctas, 1, place_bytes(places.numel())),
        ranks, places, np.int32(places.numel()), topk_ids,
        np.int32(num_tokens), np.int32(topk_ids.shape[1]), np.int32(n), out,
    )  # fmt: skip
