"""The public FFN of experts: check, hand to a backend."""

import torch
from torch import Tensor

from kernels.backends import Backend
from kernels.checks import check_ffn
from kernels.grouped_gemm import backend_for
from kernels.quantize import Quantized


def grouped_ffn(
    hidden_states: Tensor,
    tokens: Tensor,
    gate_up: Quantized,
    down: Quantized,
    offsets: Tensor,
    *,
    backend: Backend | str | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """The SwiGLU FFN of each row's group: out[r] = (silu(gate) * up) @ down[g].T for r in group g.

    gate and up are the halves of x @ gate_up[g].T, where x is hidden_states[tokens[r]].

    hidden_states  bfloat16, float16 or float32 [T, H], any strides; H a multiple of 128
    tokens         int64 [R] on the same device, contiguous, rows sorted by group: the token of each, 0 to
                   T - 1 (not checked, since that would read the device). A token may have any number of rows
    gate_up        e4m3 [G, 2I, H], the gate's rows first, with fp32 scales [G, 2I/128, H/128] (one per
                   128x128 block, `quantize_blocks`); I a multiple of 128, G from 1 to 1024
    down           e4m3 [G, H, I] with fp32 scales [G, H/128, I/128]; data of both contiguous and 16-byte
                   aligned, scales contiguous
    offsets        int32 [G+1] on the same device: group g owns rows offsets[g]:offsets[g+1]. offsets[0] is 0,
                   offsets[G] at most R and they never decrease: not checked; rows from offsets[G] on are
                   not computed, and what they hold is undefined
    backend        a Backend, its name, or None for the best one for the device
    num_sms        SMs for the GEMMs; None: all of them

    Returns bf16 [R, H]. Activations are rounded to FP8 before each GEMM (`quantize_rows`), but for backend
    "reference" on a CPU, which rounds them to bf16. NaN in a token stays in its own rows. Raises ValueError
    naming expected and got, before anything is launched.
    """
    check_ffn(hidden_states, tokens, gate_up, down, offsets, num_sms)
    chosen = backend_for(backend, hidden_states, "hidden_states")
    if tokens.numel() == 0:
        size = (0, hidden_states.shape[1])
        return torch.empty(size, dtype=torch.bfloat16, device=hidden_states.device)
    return chosen.ffn(hidden_states, tokens, gate_up, down, offsets, num_sms)
