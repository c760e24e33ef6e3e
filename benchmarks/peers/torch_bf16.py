"""torch's bf16 grouped GEMM: what FP8 saves."""

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.gemm.problem import Problem
from benchmarks.peers.peer import Peer, packed


def prepare(problem: Problem) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """The call and its output, from the operands without their scales."""
    rows = packed(problem)
    a, b = rows.data.bfloat16(), problem.b.data.bfloat16().transpose(1, 2)
    call = lambda: torch._grouped_mm(a, b, rows.ends)  # noqa: E731
    return call, call


PEER = Peer("torch bf16", "device_kernel", False, lambda: hasattr(torch, "_grouped_mm"), prepare)
