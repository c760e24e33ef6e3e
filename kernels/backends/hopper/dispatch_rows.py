"""Launches csrc/dispatch_rows.cu: quantized tokens to their permuted rows, here and on other ranks."""

import math

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, named_source, variants_by_dtype
from expertd.kernels.backends.hopper.rank_grids import ctas, ctas_per_token, place_bytes
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.jit import Variant
from expertd.kernels.ops.quantize import HiddenStates, Quantized, as_floats
from expertd.kernels.rank_memory import RankMemory, RankTokens
from expertd.limits import SCALE_BLOCK

_THREADS = 128
_CTAS = 4
"""Per SM at most: more send no faster, and leave no room for CTAs of the next launch, which begin early."""
_BY_DTYPE = variants_by_dtype("dispatch_rows", _THREADS, place_bytes, CTAS=_CTAS)
_BY_DTYPE[torch.uint8] = Variant(
    named_source("dispatch_rows", "fp8", DATATYPE="E4M3", CTAS=_CTAS), _THREADS, place_bytes
)

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

    hidden_states [t, K], floats or `packed_rows`, and topk_ids int32 [t, top_k] are those of this rank's
    tokens. The preceding launch must not write them: they are read before it ends.
    """
    k = hidden_states.shape[1]
    if hidden_states.dtype == torch.uint8:
        k = k * 32 // 33
    num_rows, top_k, places = inverse.numel(), inverse.shape[1], tokens.places
    data = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=inverse.device)
    size = (math.ceil(k / SCALE_BLOCK), num_rows)
    scales = torch.empty(size, dtype=torch.float32, device=inverse.device)
    num_ctas = ctas(on, num_sms, _CTAS, tokens.counts, k)
    sharing = ctas_per_token(num_ctas, tokens.counts, k)
    kernels.launch(
        on, _BY_DTYPE[hidden_states.dtype], Grid(num_ctas, 1, place_bytes(places.numel())),
        memory.ranks, *tokens.packed, places, np.int32(places.numel()),
        hidden_states, topk_ids, np.int32(len(topk_ids)), inverse, np.int32(max(tokens.counts)),
        np.int32(sharing), memory.dispatch_counters,
        np.int32(top_k), np.int32(k), data, scales, np.uint32(num_rows),
    )  # fmt: skip
    return Quantized(data, scales.t())


def packed_rows(hidden_states: HiddenStates) -> Tensor:
    """Quantized rows as uint8 [t, K + K/32]: values, then scales; copied unless they lie so already.

    They are sent with their bits, but for NaN, which gets others. Floats are returned as they are, and so
    are the floats of rows that would not be 16-byte aligned: K must be a multiple of 512.
    """
    if isinstance(hidden_states, Tensor):
        return hidden_states
    data, scales = hidden_states
    k = data.shape[1]
    if k % (4 * SCALE_BLOCK) != 0:
        return as_floats(hidden_states)
    row = k + k // 32
    lie_so = data.stride() == (row, 1) and scales.stride() == (row // 4, 1)
    if lie_so and scales.data_ptr() == data.data_ptr() + k and data.data_ptr() % 16 == 0:
        return data.as_strided((len(data), row), (row, 1)).view(torch.uint8)
    return torch.cat([data.view(torch.uint8), scales.contiguous().view(torch.uint8)], dim=1)
