"""The activation between the two GEMMs."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from expertd.kernels.ops.chunks import row_chunks


class Swiglu(NamedTuple):
    """gate * sigmoid(alpha * gate) * up, with gate clamped to at most limit and up to [-limit, limit].

    Most families use alpha 1 and no limit, which is silu(gate) * up.
    """

    alpha: float = 1.0
    limit: float = math.inf


SILU = Swiglu()


def swiglu(gate_up: Tensor, activation: Swiglu = SILU) -> Tensor:
    """The activation in float32: gate_up [rows, 2I] with gate columns first, result [rows, I]."""
    size = (gate_up.shape[0], gate_up.shape[1] // 2)
    out = torch.empty(size, dtype=torch.float32, device=gate_up.device)
    for gate_up_part, out_part in row_chunks(gate_up, out):
        gate, up = gate_up_part.to(torch.float32).chunk(2, dim=-1)
        torch.mul(*gated(gate, up, activation), out=out_part)
    return out


def gated(gate: Tensor, up: Tensor, activation: Swiglu) -> tuple[Tensor, Tensor]:
    """The two factors of the activation, in the tensors' dtype."""
    alpha, limit = activation
    if limit < math.inf:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) if alpha == 1 else gate * (gate * alpha).sigmoid(), up
