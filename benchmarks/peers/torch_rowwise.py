"""torch's FP8 grouped GEMM, with one scale for each row and column: less work than scales of blocks."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gemm.problem import Problem
from benchmarks.peers.peer import Peer, packed


def prepare(problem: Problem) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """The call and its output, with the first scale of each row and of each block of columns."""
    rows, b = packed(problem), problem.b
    a_scales = rows.scales[:, 0].contiguous()
    b_scales = b.scales[:, :, 0].repeat_interleave(128, 1)[:, : problem.shape.n].contiguous()
    operands = (rows.data, b.data.transpose(1, 2), a_scales, b_scales)
    call = lambda: torch._scaled_grouped_mm(*operands, rows.ends, out_dtype=torch.bfloat16)  # noqa: E731
    return call, call


PEER = Peer(
    "torch FP8, scales of rows", "device_kernel", False, lambda: hasattr(torch, "_scaled_grouped_mm"), prepare
)
