"""DeepGEMM on the same rows, with its own padding, index and scale layout; needs its wheel and nvcc."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor

from benchmarks.gemm.problem import ALIGNMENT, Pool, Problem
from benchmarks.gemm.shapes import Shape
from expertd.layout import Layout

KERNEL = "sm90_fp8_gemm"


def available() -> bool:
    """Whether DeepGEMM can be imported."""
    try:
        import deep_gemm  # noqa: F401
    except ImportError:
        return False
    return True


def version() -> str:
    """The version that DeepGEMM reports."""
    import deep_gemm

    return str(deep_gemm.__version__)


def prepare(problem: Problem) -> tuple[Callable[[], object], Callable[[], Tensor]]:
    """(call, result): the kernel's call, and a function that returns its output for our rows in order."""
    import deep_gemm

    shape = problem.shape
    b = tuple(problem.b)
    if shape.layout is Layout.MASKED:
        out = torch.empty_like(problem.out)
        a = tuple(problem.a)
        mean = max(1, sum(shape.rows) // shape.num_groups)
        call = lambda: deep_gemm.fp8_m_grouped_gemm_nt_masked(a, b, out, problem.extents, mean)  # noqa: E731
        return call, lambda: problem.real_rows(out)
    index, rows = _padded(shape)
    m = index.numel()
    data = torch.zeros(m, shape.k, dtype=torch.uint8, device="cuda")
    data[rows] = problem.a.data.view(torch.uint8)
    scales = torch.ones(shape.k // 128, m, device="cuda").t()
    scales[rows] = problem.a.scales
    a = (data.view(torch.float8_e4m3fn), scales)
    out = torch.empty(m, shape.n, dtype=torch.bfloat16, device="cuda")
    call = lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, out, index)  # noqa: E731
    return call, lambda: out[rows]


def compile_ahead(batches: Sequence[Sequence[Shape]]) -> None:
    """Compile the kernels of all shapes with nvcc, in parallel processes, before anything is timed.

    A kernel is for one layout, N, K and number of groups, and for some heights of groups: put shapes that may
    share kernels into the same batch, which one process compiles.
    """
    workers = min(16, os.cpu_count() or 1)
    pieces = sorted(spread(batches, workers), key=len, reverse=True)  # the longest first
    with ProcessPoolExecutor(min(workers, len(pieces)), mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile, pieces))


def spread(batches: Sequence[Sequence[Shape]], workers: int) -> list[Sequence[Shape]]:
    """The batches, cut into pieces of neighbors if they are fewer than the workers."""
    pieces = []
    for batch in batches:
        size = -(-len(batch) // max(1, workers // len(batches)))
        pieces += [batch[start : start + size] for start in range(0, len(batch), size)]
    return pieces


def _compile(shapes: Sequence[Shape]) -> None:
    pool = Pool(max(s.num_groups * s.n * s.k + (sum(s.rows) + s.num_groups * s.max_m) * s.k for s in shapes))
    for shape in shapes:
        call, _ = prepare(pool.problem(shape))
        call()
        torch.cuda.synchronize()


def _padded(shape: Shape) -> tuple[Tensor, Tensor]:
    """(the group of every padded row or -1, the indices of our rows among them)."""
    index, rows, start = [], [], 0
    for group, height in enumerate(shape.rows):
        padded = -(-height // ALIGNMENT) * ALIGNMENT
        index.append(torch.full((padded,), -1, dtype=torch.int32))
        index[-1][:height] = group
        rows.append(torch.arange(start, start + height))
        start += padded
    return torch.cat(index).cuda(), torch.cat(rows).cuda()
