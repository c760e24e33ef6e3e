"""Launches csrc/unpermute_rows.cu: the weighted sum of each token's permuted rows."""

import math

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.launch import (
    Grid,
    Kernels,
    OnStream,
    Variant,
    named_source,
    no_shared_bytes,
)

_THREADS, _COLUMNS = 256, 2048  # per CTA


def _variant(datatype: str) -> Variant:
    source = named_source("unpermute_rows", datatype.lower(), DATATYPE=datatype)
    return Variant(source, _THREADS, no_shared_bytes)


VARIANTS = {
    torch.bfloat16: _variant("BF16"),
    torch.float16: _variant("FP16"),
    torch.float32: _variant("FP32"),
}
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
