"""Launches the kernels between the ranks of an expert-parallel layer; csrc/ranks.cuh has their protocol."""

import math

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.launch import (
    Grid,
    Kernels,
    OnStream,
    Variant,
    multiprocessors,
    named_source,
    no_shared_bytes,
    variants_by_dtype,
)
from expertd.kernels.ops.quantize import Quantized
from expertd.limits import SCALE_BLOCK


def _place_bytes(num_experts: int) -> int:
    return 4 * num_experts


_DISPATCH = variants_by_dtype("dispatch_rows", 128, _place_bytes)
_EXPAND = Variant(named_source("expand_rows"), 128, no_shared_bytes)
_RETURN = Variant(named_source("return_rows"), 256, no_shared_bytes)
_ADD = variants_by_dtype("add_ranks", 256, _place_bytes)
_COLUMNS = 2048  # per CTA and step, of each of them
_DISPATCH_CTAS, _RETURN_CTAS, _ADD_CTAS = 12, 4, 8  # per SM at most: as many as run at once

VARIANTS = (*_DISPATCH.values(), _EXPAND, _RETURN, *_ADD.values())


def _parts(columns: int) -> int:
    return math.ceil(columns / _COLUMNS)


def _ctas(on: OnStream, num_sms: int | None, per_sm: int, steps: int) -> int:
    return max(1, min(steps, per_sm * multiprocessors(on.device, num_sms)))


def dispatch_rows(
    kernels: Kernels,
    on: OnStream,
    ranks: Tensor,
    first_tokens: Tensor,
    places: Tensor,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    total_tokens: int,
    num_sms: int | None,
) -> None:
    """Quantize this rank's tokens [t, H], and write each to the ranks that hold its experts.

    first_tokens int32 [MAX_RANKS + 1]; places int32 [E], rank * 65536 + group of each expert; total_tokens
    of all ranks; num_sms is the same on all ranks.
    """
    num_tokens, h = hidden_states.shape
    most = _DISPATCH_CTAS * multiprocessors(on.device, num_sms)
    grid = Grid(_ctas(on, num_sms, _DISPATCH_CTAS, num_tokens * _parts(h)), 1, _place_bytes(places.numel()))
    kernels.launch(
        on, _DISPATCH[hidden_states.dtype], grid,
        ranks, first_tokens, places, np.int32(places.numel()), hidden_states, topk_ids, topk_weights,
        np.int32(num_tokens), np.int32(topk_ids.shape[1]), np.int32(h),
        np.int32(most), np.int32(_ctas(on, num_sms, _RETURN_CTAS, total_tokens * _parts(h))),
    )  # fmt: skip


def expand_rows(
    kernels: Kernels, on: OnStream, received: Tensor, received_scales: Tensor, inverse: Tensor
) -> Quantized:
    """received e4m3 [T, K], fp32 scales [T, K / 128], as permuted rows [T * top_k, K]; inverse -1: none."""
    (num_tokens, top_k), k, num_rows = inverse.shape, received.shape[1], inverse.numel()
    data = torch.empty((num_rows, k), dtype=torch.float8_e4m3fn, device=inverse.device)
    scales = torch.empty((k // SCALE_BLOCK, num_rows), device=inverse.device)
    kernels.launch(
        on, _EXPAND, Grid(num_tokens * _parts(k)),
        received, received_scales, inverse, np.int32(top_k), np.int32(k), data, scales, np.uint32(num_rows),
    )  # fmt: skip
    return Quantized(data, scales.t())


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
        on, _RETURN, Grid(_ctas(on, num_sms, _RETURN_CTAS, num_tokens * _parts(n))),
        ranks, first_tokens, rows, inverse, np.int32(num_tokens), np.int32(top_k), np.int32(n),
    )  # fmt: skip


def add_ranks(
    kernels: Kernels,
    on: OnStream,
    ranks: Tensor,
    places: Tensor,
    topk_ids: Tensor,
    out: Tensor,
    num_sms: int | None,
) -> None:
    """Write out [t, N]: the sums that the ranks have returned for this rank's tokens."""
    num_tokens, n = out.shape
    ctas = _ctas(on, num_sms, _ADD_CTAS, num_tokens * _parts(n))
    kernels.launch(
        on, _ADD[out.dtype], Grid(ctas, 1, _place_bytes(places.numel())),
        ranks, places, np.int32(places.numel()), topk_ids,
        np.int32(num_tokens), np.int32(topk_ids.shape[1]), np.int32(n), out,
    )  # fmt: skip
