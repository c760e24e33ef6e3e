"""Launches csrc/router_logits.cu: the router's logits as partial sums."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.launch import Grid, Kernels, multiprocessors, named_source
from expertd.kernels.backends.hopper.tensor_maps import TensorMapCache
from expertd.kernels.backends.streams import OnStream
from expertd.kernels.jit import Variant

TOKENS, EXPERTS = 64, 128
"""Tokens and experts per CTA, which are also the rows of its TMA boxes."""
SUMS, SUM_COLUMNS = 4, 256
"""Sums per part of K, and columns per sum."""
_FEW_TOKENS = 2  # per SM: up to this many, the CTAs of both routing launches fit on the device together
_STORAGE_BYTES = SUM_COLUMNS // 64 * ((TOKENS + EXPERTS) * 128 + 8)


def _shared_bytes(num_groups: int) -> int:
    return _STORAGE_BYTES


VARIANT = Variant(
    named_source(
        "router_logits", TOKENS=TOKENS, EXPERTS=EXPERTS, SUM_COLUMNS=SUM_COLUMNS, STORAGE_BYTES=_STORAGE_BYTES
    ),
    128,
    _shared_bytes,
)


class Logits(NamedTuple):
    """data fp32 [N, T, E], to be added up over N: first each `sums` neighbors, then their sums in turn."""

    data: Tensor
    sums: int


def router_logits(
    kernels: Kernels, on: OnStream, tensor_maps: TensorMapCache, hidden_states: Tensor, router: Tensor
) -> Logits:
    """The logits of bf16 tokens [T, H] by a router [E, H]; batch-invariant once added up."""
    (num_tokens, k), num_experts = hidden_states.shape, router.shape[0]
    parts = math.ceil(k / (SUMS * SUM_COLUMNS))
    tiles = math.ceil(num_tokens / TOKENS) * math.ceil(num_experts / EXPERTS)
    is_few = num_tokens <= _FEW_TOKENS * multiprocessors(on.device, None)
    left = SUMS if is_few else 1  # partial sums per part
    size = (parts * left, num_tokens, num_experts)
    logits = torch.empty(size, dtype=torch.float32, device=hidden_states.device)
    kernels.launch(
        on, VARIANT, Grid(tiles * parts * left, shared_bytes=_STORAGE_BYTES),
        tensor_maps.get(hidden_states, TOKENS), tensor_maps.get(router, EXPERTS),
        np.int32(num_tokens), np.int32(num_experts), np.int32(parts * left), np.int32(SUMS // left), logits,
    )  # fmt: skip
    return Logits(logits, left)
