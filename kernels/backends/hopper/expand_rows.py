"""Launches csrc/expand_rows.cu: received tokens to their permuted rows."""

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
from expertd.kernels.backends.hopper.rank_grids import parts
from expertd.kernels.ops.quantize import Quantized
from expertd.limits import SCALE_BLOCK

VARIANT = Variant(named_source("expand_rows"), 128, no_shared_bytes)


def expand_rows(
    kernels: Kernels, on: OnStream, received: Tensor, received_scales: Tensor, inverse: Tensor
) -> Quantized:
    """received e4m3 [T, K], fp32 scales [T, K / 128], as permuted rows [T * top_k, K]; inverse -1: none."""
    (num_tokens, top_k), k, num_rows = inverse.shape, received.shape[1], inverse.numel()
    data = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=inverse.device)
    scales = torch.empty((k // SCALE_BLOCK, num_rows), device=inverse.device)
    kernels.launch(
        on, VARIANT, Grid(num_tokens * parts(k)),
        received, received_scales, inverse, np.int32(top_k), np.int32(k), data, scales, np.uint32(num_rows),
    )  # fmt: skip
    return Quantized(data, scales.t())
