"""The activation between the two GEMMs."""

import torch
from torch import Tensor

from kernels.chunks import row_chunks


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up in float32: gate_up [rows, 2I] with gate columns first, result [rows, I]."""
    size = (gate_up.shape[0], gate_up.shape[1] // 2)
    out = torch.empty(size, dtype=torch.float32, device=gate_up.device)
    for gate_up_part, out_part in row_chunks(gate_up, out):
        gate, up = gate_up_part.to(torch.float32).chunk(2, dim=-1)
        torch.mul(torch.nn.functional.silu(gate), up, out=out_part)
    return out
