"""Launches csrc/unpermute_rows.cu: the weighted sum of each token's permuted rows."""

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
from expertd.kernels.device_calls import CallTable
from expertd.kernels.jit import Variant

_THREADS, _COLUMNS = 256, 2048  # per CTA

VARIANTS = variants_by_dtype("unpermute_rows", _THREADS, BIASED=0, CALLS=0)
"""Variants by the dtype of the output."""
BIASED = variants_by_dtype("unpermute_rows", _THREADS, prefix="biased_", BIASED=1, CALLS=0)
"""The same, with a bias for each group's rows."""


def _calls(suffix: str, biased: int) -> Variant:
    source = named_source("unpermute_rows", suffix, DATATYPE="BF16", BIASED=biased, CALLS=1)
    return Variant(source, _THREADS, no_shared_bytes)


CALLS = _calls("calls", 0), _calls("biased_calls", 1)
"""For outputs that go to the callers of device calls, in bf16; the second one with biases."""


def can_unpermute(rows: Tensor, inverse: Tensor, out: Tensor) -> bool:
    """Whether the kernel supports these: a thread copies 16 bytes at a time, of one slot at least."""
    return (
        inverse.shape[1] > 0
        and rows.dtype == torch.bfloat16
        and inverse.dtype == torch.int32
        and out.dtype in VARIANTS
        and rows.shape[1] % 8 == 0
        and all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (rows, out))
    )


def unpermute_rows(
    kernels: Kernels,
    on: OnStream,
    rows: Tensor,
    inverse: Tensor,
    topk_weights: Tensor,
    out: Tensor,
    biases: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write out [T, N]: the weighted sum of rows bf16 [R, N] at inverse int32 [T, top_k] (-1: none).

    biases: groups int32 [T, top_k], and bf16 [G, N], which is added to each row of a group before it is
    weighted; None: nothing is. The preceding launch must write neither.
    """
    (num_tokens, top_k), n = inverse.shape, rows.shape[1]
    variants = VARIANTS if biases is None else BIASED
    kernels.launch(
        on, variants[out.dtype], Grid(num_tokens * math.ceil(n / _COLUMNS)),
        rows, inverse, topk_weights, np.int32(top_k), np.int32(n), *(biases or ()), out,
    )  # fmt: skip


def unpermute_calls(
    kernels: Kernels,
    on: OnStream,
    rows: Tensor,
    inverse: Tensor,
    topk_weights: Tensor,
    calls: CallTable,
    biases: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Write the sums of `unpermute_rows` to the callers of a step, in bf16, and answer them.

    The step must be complete before the preceding launch begins.
    """
    (num_tokens, top_k), n = inverse.shape, rows.shape[1]
    kernels.launch(
        on, CALLS[biases is not None], Grid(num_tokens * math.ceil(n / _COLUMNS)),
        rows, inverse, topk_weights, np.int32(top_k), np.int32(n), *(biases or ()),
        calls.requests.address, calls.step.data_ptr(),
    )  # fmt: skip
