"""Launches csrc/quantize_permute.cu: quantizes each token once and writes it to its permuted rows."""

import math

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.launch import (
    Grid,
    Kernels,
    named_source,
    no_shared_bytes,
    variants_by_dtype,
)
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.jit import Variant
from expertd.kernels.ops.quantize import Quantized
from expertd.kernels.request_table import RequestTable
from expertd.limits import SCALE_BLOCK

_THREADS, _COLUMNS = 128, 2048  # per CTA

VARIANTS = variants_by_dtype("quantize_permute", _THREADS, CALLS=0)
"""Variants by the dtype of the tokens."""
CALLS = Variant(
    named_source("quantize_permute", "calls", DATATYPE="BF16", CALLS=1), _THREADS, no_shared_bytes
)
"""For tokens in the memory of device calls."""


def quantize_permute(kernels: Kernels, on: OnStream, hidden_states: Tensor, inverse: Tensor) -> Quantized:
    """hidden_states [T, K] as permuted rows [T * top_k, K]; inverse int32 [T, top_k], -1: no row.

    K is a multiple of 16; the last of a row's scales may stand for fewer than 128 columns.
    """
    return _launch(kernels, on, VARIANTS[hidden_states.dtype], hidden_states, hidden_states.shape[1], inverse)


def quantize_permute_calls(
    kernels: Kernels, on: OnStream, table: RequestTable, k: int, inverse: Tensor
) -> Quantized:
    """The same for bf16 tokens that lie where `table` says, in memory of this GPU that others write.

    The table and the tokens must be complete before the preceding launch begins.
    """
    return _launch(kernels, on, CALLS, table.address, k, inverse)


def _launch(
    kernels: Kernels, on: OnStream, variant: Variant, tokens: Tensor | int, k: int, inverse: Tensor
) -> Quantized:
    (num_tokens, top_k), num_rows = inverse.shape, inverse.numel()
    data = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=inverse.device)
    size = (math.ceil(k / SCALE_BLOCK), num_rows)
    scales = torch.empty(size, dtype=torch.float32, device=inverse.device)
    kernels.launch(
        on, variant, Grid(num_tokens * math.ceil(k / _COLUMNS)),
        tokens, inverse, np.int32(top_k), np.int32(k), data, scales, np.uint32(num_rows),
    )  # fmt: skip
    return Quantized(data, scales.t())
