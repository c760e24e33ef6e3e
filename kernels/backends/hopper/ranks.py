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
    named_source,
    no_shared_bytes,
    variants_by_dtype,
)
from expertd.kernels.ops.quantize import Quantized
from expertd.limits import SCALE_BLOCK

_DISPATCH = variants_by_dtype("dispatch_rows", 128)
_EXPAND = Variant(named_source("expand_rows"), 128, no_shared_bytes)
_RETURN = Variant(named_source("return_rows"), 256, no_shared_bytes)
_ADD = variants_by_dtype("add_ranks", 256)
_COLUMNS = 2048  # per CTA, of each of them

VARIANTS = (*_DISPATCH.values(), _EXPAND, _RETURN, *_ADD.values())


def _parts(columns: int) -> int:
    return math.ceil(columns / _COLUMNS)


def dispatch_rows(
    kernels: Kernels,
    on: OnStream,
    ranks: Tensor,
    first_tokens: Tensor,
    places: Tensor,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
) -> None:
    """Quantize this rank's tokens [t, H], and write each to the ranks that hold its experts.

    first_tokens int32 [R + 1]; places int32 [E], rank * 65536 + group of each expert.
    """
    num_tokens, h = hidden_states.shape
    kernels.launch(
        on, _DISPATCH[hidden_states.dtype], Grid(max(1, num_tokens * _parts(h))),
        ranks, first_tokens, places, np.int32(places.numel()), hidden_states, topk_ids, topk_weights,
        np.int32(num_tokens), np.int32(topk_ids.shape[1]), np.int32(h),
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
    kernels: Kernels, on: OnStream, ranks: Tensor, first_tokens: Tensor, rows: Tensor, inverse: Tensor
) -> None:
    """Write each token's weighted sum of rows bf16 [R, N] to the token's rank."""
    (num_tokens, top_k), n = inverse.shape, rows.shape[1]
    kernels.launch(
        on, _RETURN, Grid(max(1, num_tokens * _parts(n))),
        ranks, first_tokens, rows, inverse, np.int32(num_tokens), np.int32(top_k), np.int32(n),
    )  # fmt: skip


def add_ranks(
    kernels: Kernels, on: OnStream, ranks: Tensor, places: Tensor, topk_ids: Tensor, out: Tensor
) -> None:
    """Write out [t, N]: the sums that the ranks have returned for this rank's tokens."""
    num_tokens, n = out.shape
    kernels.launch(
        on, _ADD[out.dtype], Grid(max(1, num_tokens * _parts(n))),
        ranks, places, np.int32(places.numel()), topk_ids,
        np.int32(num_tokens), np.int32(topk_ids.shape[1]), np.int32(n), out,
    )  # fmt: skip
