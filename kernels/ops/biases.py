"""Biases of experts, for families that have them."""

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertBiases(NamedTuple):
    """What is added to each expert's two products, in bf16.

    gate_up  [G, 2I], the gates' first, added before the activation
    down     [G, H], added before the routing weight is applied
    """

    gate_up: Tensor
    down: Tensor


def add_biases(rows: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, N], sorted by group, plus bias [G, N] of each row's group; those from offsets[G] on plus any.

    offsets  int32 [G + 1]. No host synchronization.
    """
    places = torch.arange(rows.shape[0], device=rows.device, dtype=offsets.dtype)
    groups = torch.searchsorted(offsets[1:], places, right=True).clamp_(max=bias.shape[0] - 1)
    return rows + bias[groups]
