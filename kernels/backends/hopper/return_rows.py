"""Launches csrc/return_rows.cu: each token's weighted sum of rows to the token's rank."""

import numpy as np
from torch import Tensor

from expertd.kernels.backends.hopper.launch import (
    Grid,
    Kernels,
    OnStream,
    Variant,
    named_source,
    no_shared_bytes,
)
from expertd.kernels.backends.hopper.rank_grids import ctas, parts

VARIANT = Variant(named_source("return_rows"), 256, no_shared_bytes)
_CTAS = 3  # per SM at most: leaves room for those of add_ranks


def return_rows(
    kernels: Kernels,
    on: OnStream,
    ranks: Tensor,
    first_tokens: Tensor,
    rows: Tensor,
    inverse: Tensor,
    num_sms: int | None,
) -> None:
    """Write each token's weighted sum of rows bf16 [R, N] to the token's rank."""
    (num_tokens, top_k), n = inverse.shape, rows.shape[1]
    kernels.launch(
        on, VARIANT, Grid(ctas(on, num_sms, _CTAS, num_tokens * parts(n))),
        ranks, first_tokens, rows, inverse, np.int32(num_tokens), np.int32(top_k), np.int32(n),
    )  # fmt: skip
