"""Launches csrc/quantize_permute.cu: quantizes each token once and writes it to its permuted rows."""

import math

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, OnStream, variants_by_dtype
from expertd.kernels.ops.quantize import Quantized
from expertd.limits import SCALE_BLOCK

_THREADS, _COLUMNS = 128, 2048  # per CTA

VARIANTS = variants_by_dtype("quantize_permute", _THREADS)
"""Variants by the dtype of the tokens."""


def quantize_permute(kernels: Kernels, on: OnStream, hidden_states: Tensor, inverse: Tensor) -> Quantized:
    """hidden_states [T, K] as permuted rows [T * top_k, K]; inverse int32 [T, top_k], -1: no row.

    K is a multiple of 16; the last of a row's scales may stand for fewer than 128 columns.
    """
    (num_tokens, k), num_rows = hidden_states.shape, inverse.numel()
    data = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=inverse.device)
    size = (math.ceil(k / SCALE_BLOCK), num_rows)
    scales = torch.empty(size, dtype=torch.float32, device=inverse.device)
    kernels.launch(
        on, VARIANTS[hidden_states.dtype], Grid(num_tokens * math.ceil(k / _COLUMNS)),
        hidden_states, inverse, np.int32(inverse.shape[1]), np.int32(k), data, scales, np.uint32(num_rows),
    )  # fmt: skip
    return Quantized(data, scales.t())
