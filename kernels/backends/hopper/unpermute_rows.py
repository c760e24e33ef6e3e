"""Launches csrc/unpermute_rows.cu: the weighted sum of each token's permuted rows."""

import math

import numpy as np
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, OnStream, variants_by_dtype

_THREADS, _COLUMNS = 256, 2048  # per CTA

VARIANTS = variants_by_dtype("unpermute_rows", _THREADS)
"""Variants by the dtype of the output."""


def unpermute_rows(
    kernels: Kernels, on: OnStream, rows: Tensor, inverse: Tensor, topk_weights: Tensor, out: Tensor
) -> None:
    """Write out [T, N]: the weighted sum of rows bf16 [R, N] at inverse int32 [T, top_k] (-1: none)."""
    (num_tokens, top_k), n = inverse.shape, rows.shape[1]
    kernels.launch(
        on, VARIANTS[out.dtype], Grid(num_tokens * math.ceil(n / _COLUMNS)),
        rows, inverse, topk_weights, np.int32(top_k), np.int32(n), out,
    )  # fmt: skip
