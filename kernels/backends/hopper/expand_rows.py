"""Launches csrc/expand_rows.cu: tokens that arrive to their permuted rows."""

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
from expertd.kernels.rank_memory import RankMemory, RankTokens
from expertd.limits import SCALE_BLOCK

VARIANT = Variant(named_source("expand_rows"), 128, no_shared_bytes)


def expand_rows(
    kernels: Kernels, on: OnStream, memory: RankMemory, tokens: RankTokens, inverse: Tensor
) -> Quantized:
    """The tokens that arrive in `memory` [T, K], as permuted rows [T * top_k, K]; inverse -1: none."""
    top_k, k, num_rows = inverse.shape[1], memory.data.shape[1], inverse.numel()
    data = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=inverse.device)
    scales = torch.empty((k // SCALE_BLOCK, num_rows), device=inverse.device)
    kernels.launch(
        on, VARIANT, Grid(max(tokens.counts) * memory.num_ranks * parts(k)),
        memory.ranks, tokens.first_tokens, memory.data, memory.scales, inverse,
        np.int32(memory.num_ranks), np.int32(top_k), np.int32(k), data, scales, np.uint32(num_rows),
    )  # fmt: skip
    return Quantized(data, scales.t())
