"""CUTLASS's block-scaled grouped GEMM for Hopper, as SGLang builds it: needs the files of sglang-kernel.

Only sgl_kernel/sm90/common_ops.abi3.so is used, so no other file of the package has to be there.
"""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gemm.problem import Problem
from benchmarks.peers.peer import Peer, packed

_LIBRARY = Path("sm90", "common_ops.abi3.so")
WORKSPACE_BYTES = 64 << 20  # TMA descriptors of every CTA


@cache
def available() -> bool:
    """Whether the library is there and loads."""
    spec = find_spec("sgl_kernel")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / _LIBRARY).exists():
            try:
                torch.ops.load_library(Path(folder) / _LIBRARY)  # type: ignore[no-untyped-call]
            except OSError:
                return False
            return True
    return False


def prepare(problem: Problem) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """The call, and its output; the pointers are computed by a launch of their own, which is not timed."""
    rows, shape, device = packed(problem), problem.shape, problem.a.data.device
    g, n, k = shape.num_groups, shape.n, shape.k
    out = torch.empty(sum(shape.rows), n, dtype=torch.bfloat16, device=device)
    pointers = [torch.empty(g, dtype=torch.int64, device=device) for _ in range(5)]
    strides = [torch.full((g,), stride, dtype=torch.int64, device=device) for stride in (k, k, n)]
    layouts = [torch.zeros(g, 5, dtype=torch.int32, device=device) for _ in range(2)]
    sizes = torch.tensor([[m, n, k] for m in shape.rows], dtype=torch.int32, device=device)
    starts = torch.cat((rows.ends.new_zeros(1), rows.ends[:-1]))
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    b, b_scales = (tensor.transpose(1, 2) for tensor in problem.b)
    operands = (rows.data, b, rows.scales, b_scales)
    gemm = torch.ops.sgl_kernel.fp8_blockwise_scaled_grouped_mm
    call = lambda: gemm(out, *pointers, *operands, *strides, *layouts, sizes, starts, workspace)  # noqa: E731
    return call, lambda: out


PEER = Peer("CUTLASS", "device_kernel", True, available, prepare)
