"""Host cost benchmark: `python -m benchmarks host_cost [--json FILE]`.

One row per case: the microseconds that one Python call of a grouped GEMM occupies its thread, outside a CUDA
graph. Host clock over 200 calls, started with the device idle and stopped without waiting for it; median of
50 such batches. The problem is tiny and 200 launches fit in the driver's queue, so none waits for the GPU.
Reused: the same tensors in every call, whose descriptors are cached. Fresh: new activations in every call;
each call builds a descriptor and then frees its activations (allocating them is not counted). If out is not
given, every call allocates and frees it.
"""

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gemm.problem import Pool, Problem
from benchmarks.gemm.shapes import Shape
from benchmarks.lib.run import Result, new_parser
from benchmarks.lib.timing import cpu_name, expect_gpu, header
from expertd import kernels
from expertd.kernels import Quantized
from expertd.layout import Layout

Row = dict[str, Any]
CALLS, BATCHES, WARM_UP = 200, 50, 5
SHAPES = tuple(  # few rows per group, and more: the kernels for more also take a descriptor of out
    Shape(layout.value, layout, (rows,) * 4, 512, 512, max_m=rows if layout is Layout.MASKED else 0)
    for layout in Layout
    for rows in (8, 128)
)


def caller(problem: Problem, out: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The public function on this problem, as a function of the activations."""
    scales, rest = problem.a.scales, (problem.b, problem.extents)
    if problem.shape.layout is Layout.CONTIGUOUS:
        return lambda a: kernels.grouped_gemm_contiguous(Quantized(a, scales), *rest, out=out)
    return lambda a: kernels.grouped_gemm_masked(Quantized(a, scales), *rest, out=out)


def host_microseconds(
    call: Callable[[Tensor], object], activations: Callable[[], list[Tensor]]
) -> list[float]:
    """The host's time per call in each batch; every batch uses up a list made by `activations`."""
    batches = []
    for _ in range(WARM_UP + BATCHES):
        left = activations()
        calls = len(left)
        torch.cuda.synchronize()
        start = time.perf_counter()
        while left:
            call(left.pop())
        batches.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return batches[WARM_UP:]


def measure(problem: Problem, given: bool, fresh: bool) -> Row:
    """One row of the table."""
    call = caller(problem, problem.out if given else None)
    if fresh:
        batches = host_microseconds(call, lambda: [problem.a.data.clone() for _ in range(CALLS)])
    else:
        batches = host_microseconds(call, lambda: [problem.a.data] * CALLS)
    return {
        "shape": problem.shape.label, "layout": problem.shape.layout.value,
        "out": "given" if given else "allocated", "tensors": "fresh" if fresh else "reused",
        "us": statistics.median(batches), "min_us": min(batches), "max_us": max(batches),
    }  # fmt: skip


def main() -> None:
    """Run the benchmark."""
    parser = new_parser(__doc__)
    options = parser.parse_args()
    expect_gpu("benchmarks host_cost")
    kernels.resolve_backend("hopper").warm_up()
    result = Result(
        options.json,
        header()
        | {
            "cpu": cpu_name(),
            "python": platform.python_version(),
            "method": f"host clock, median of {BATCHES} batches of {CALLS} calls",
        },
    )
    pool = Pool(1 << 24)
    for shape in SHAPES:
        problem = pool.problem(shape)
        for fresh in (False, True):
            for given in (True, False):
                result.put(measure(problem, given, fresh))
