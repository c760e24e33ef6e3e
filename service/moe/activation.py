"""The activation between the two GEMMs."""

import torch
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in float32: gate_up [rows, 2I] with gate columns first, result [rows, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate.to(torch.float32)).mul_(up)
