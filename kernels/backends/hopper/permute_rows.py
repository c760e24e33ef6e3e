"""Launches csrc/permute_rows.cu: copies tokens that are quantized already to their permuted rows."""

import math

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, named_source, no_shared_bytes
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.jit import Variant
from expertd.kernels.ops.quantize import Quantized
from expertd.limits import SCALE_BLOCK

_THREADS, _COLUMNS = 128, 2048  # per CTA

VARIANT = Variant(named_source("permute_rows"), _THREADS, no_shared_bytes)


def permute_rows(kernels: Kernels, on: OnStream, hidden_states: Quantized, inverse: Tensor) -> Quantized:
    """hidden_states [T, K] as permuted rows [T * top_k, K]; inverse int32 [T, top_k], -1: no row.

    K is a multiple of 128. The data's rows are 16-byte aligned, and contiguous each; scales may have any
    strides.
    """
    (num_tokens, k), num_rows = hidden_states.data.shape, inverse.numel()
    data = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=inverse.device)
    scales = torch.empty((k // SCALE_BLOCK, num_rows), dtype=torch.float32, device=inverse.device)
    strides = (np.uint32(stride) for stride in hidden_states.scales.stride())
    kernels.launch(
        on, VARIANT, Grid(num_tokens * math.ceil(k / _COLUMNS)),
        hidden_states.data, np.uint32(hidden_states.data.stride(0)), hidden_states.scales, *strides,
        inverse, np.int32(inverse.shape[1]), np.int32(k), data, scales, np.uint32(num_rows),
    )  # fmt: skip
    return Quantized(data, scales.t())
