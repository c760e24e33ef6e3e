"""Launches csrc/dispatch_rows.cu: quantized tokens to their permuted rows, here and on other ranks."""

import math

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, OnStream, variants_by_dtype
from expertd.kernels.backends.hopper.rank_grids import ctas, place_bytes
from expertd.kernels.ops.quantize import Quantized
from expertd.kernels.rank_memory import RankMemory, RankTokens
from expertd.limits import SCALE_BLOCK

_BY_DTYPE = variants_by_dtype("dispatch_rows", 128, place_bytes)
_CTAS = 8  # per SM at most: as many as run at once

VARIANTS = tuple(_BY_DTYPE.values())


def dispatch_rows(
    kernels: Kernels,
    on: OnStream,
    memory: RankMemory,
    tokens: RankTokens,
    hidden_states: Tensor,
    topk_ids: Tensor,
    inverse: Tensor,
    num_sms: int | None,
) -> Quantized:
    """The permuted rows [T * top_k, K] of all ranks' tokens on this rank; inverse int32 [T, top_k], -1: none.

    hidden_states [t, K] and topk_ids int32 [t, top_k] are those of this rank's tokens. The preceding launch
    must not write them: they are read before it ends.
    """
    k, num_rows, top_k, places = hidden_states.shape[1], inverse.numel(), inverse.shape[1], tokens.places
    data = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=inverse.device)
    scales = torch.empty((math.ceil(k / SCALE_BLOCK), num_rows), device=inverse.device)
    num_ctas = ctas(on, num_sms, _CTAS, tokens.counts, k)
    kernels.launch(
        on, _BY_DTYPE[hidden_states.dtype], Grid(num_ctas, 1, place_bytes(places.numel())),
        memory.ranks, tokens.first_tokens, places, np.int32(places.numel()),
        hidden_states, topk_ids, inverse, np.int32(max(tokens.counts)), np.int32(top_k), np.int32(k),
        data, scales, np.uint32(num_rows),
    )  # fmt: skip
    return Quantized(data, scales.t())
