"""torch's grouped GEMMs: in bf16, for what FP8 saves; and in FP8 with one scale for each row and column."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gemm.problem import Problem
from benchmarks.peers.peer import Peer, packed


def prepare_bf16(problem: Problem) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """The call and its output, from the operands without their scales."""
    rows = packed(problem)
    a, b = rows.data.bfloat16(), problem.b.data.bfloat16().transpose(1, 2)
    call = lambda: torch._grouped_mm(a, b, rows.ends)  # noqa: E731
    return call, call


def prepare_rowwise(problem: Problem) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """The call and its output, with the first scale of each row and of each block of columns."""
    rows, b = packed(problem), problem.b
    a_scales = rows.scales[:, 0].contiguous()
    b_scales = b.scales[:, :, 0].repeat_interleave(128, 1)[:, : problem.shape.n].contiguous()
    operands = (rows.data, b.data.transpose(1, 2), a_scales, b_scales)
    call = lambda: torch._scaled_grouped_mm(*operands, rows.ends, out_dtype=torch.bfloat16)  # noqa: E731
    return call, call


BF16 = Peer("torch bf16", "device_kernel", False, lambda: hasattr(torch, "_grouped_mm"), prepare_bf16)
ROWWISE = Peer(
    "torch FP8, scales of rows",
    "device_kernel",
    False,
    lambda: hasattr(torch, "_scaled_grouped_mm"),
    prepare_rowwise,
)
