"""Sweep of grouped GEMMs against DeepGEMM: `python -m benchmarks gemm_sweep [--json FILE] [--coarse]`.

Every (rows of a group) x (N, K of six models' GEMMs) for 1, 2 and 4 groups, in the contiguous layout, and in
the masked one up to 1200 rows. Kernel times by CUPTI, L2 flushed by a 512 MB fill before each launch; ours
and DeepGEMM's take turns, and each figure is the better of two medians of 7. DeepGEMM's kernels, which are
compiled for single shapes, are compiled before: most of the time goes into that, and a second run with the
same DG_JIT_CACHE_DIR saves it. FILE is written after each (N, K); rows of other (N, K) stay in it.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gemm import deep_gemm_peer
from benchmarks.gemm.grouped_gemm import KERNEL
from benchmarks.gemm.problem import Pool
from benchmarks.gemm.shapes import Shape
from benchmarks.layer.moe_layer import difference
from benchmarks.lib.markdown import by, mean, span, table
from benchmarks.lib.run import Result, earlier, line_of, new_parser
from benchmarks.lib.timing import best_of_rounds, copy_bandwidth, expect_gpu, header
from expertd import kernels
from expertd.layout import Layout

Row = dict[str, Any]
GOAL = 0.97  # the least speed over DeepGEMM of any point
MODELS = {  # hidden and intermediate size of an expert; Kimi-K2's are DeepSeek-V3's
    "DeepSeek-V4-Pro": (7168, 3072),
    "DeepSeek-V3": (7168, 2048),
    "DeepSeek-V4-Flash": (4096, 2048),
    "GLM-4.5": (5120, 1536),
    "Qwen3-235B": (4096, 1536),
    "Qwen3-30B": (2048, 768),
}
# A geometric grid, and heights just above a tile's or where a launch once was slow
# (docs/internals/kernel-log.md).
ROWS = (1, 4, 16, 33, 70, 129, 200, 300, 512, 1000, 1033, 1186, 2048, 3000, 4096)
COARSE_ROWS = (1, 16, 70, 300, 1000, 1186, 3000)
MASKED_MAX_ROWS = 1200  # above this, callers use the contiguous layout
GROUPS = (1, 2, 4)
COARSE_GROUPS = (1, 2)


@dataclass(frozen=True)
class Point:
    """The weights of a group: [n, k]."""

    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.n}x{self.k}"


def all_points() -> list[Point]:
    """(N, K) of every model's gate-and-up GEMM, then of its down GEMM."""
    return [
        point
        for hidden, intermediate in MODELS.values()
        for point in (Point(2 * intermediate, hidden), Point(hidden, intermediate))
    ]


def parse_point(text: str) -> Point:
    """`N,K`, both multiples of 128."""
    try:
        n, k = (int(size) for size in text.split(","))
    except ValueError:
        n = k = 0
    if n < 128 or k < 128 or n % 128 or k % 128:
        raise argparse.ArgumentTypeError(f"expected N,K as multiples of 128 such as 4096,7168, got {text!r}")
    return Point(n, k)


def batches(point: Point, coarse: bool = False) -> list[list[Shape]]:
    """The point's shapes, those of one layout and number of groups together: DeepGEMM's share kernels."""
    rows, groups = (COARSE_ROWS, COARSE_GROUPS) if coarse else (ROWS, GROUPS)
    return [
        [_shape(layout, num_groups, height, point) for height in rows if height <= max_rows]
        for layout, max_rows in ((Layout.CONTIGUOUS, max(rows)), (Layout.MASKED, MASKED_MAX_ROWS))
        for num_groups in groups
    ]


def _shape(layout: Layout, num_groups: int, rows: int, point: Point) -> Shape:
    """Every group has the same number of rows."""
    max_m = -(-rows // 128) * 128 if layout is Layout.MASKED else 0
    return Shape("sweep", layout, (rows,) * num_groups, point.n, point.k, max_m)


def measure(shapes: Sequence[Shape], pool: Pool) -> list[Row]:
    """A row for each shape; all are measured in one profile."""
    calls, rows = [], []
    for shape in shapes:
        problem = pool.problem(shape)
        call, result = deep_gemm_peer.prepare(problem)
        problem.out.fill_(math.nan)
        ours = problem.real_rows(problem.run())
        call()
        rows.append(_row(shape) | {"diff": difference(ours, result())})
        calls += [(problem.run, KERNEL), (call, deep_gemm_peer.KERNEL)]
    times = best_of_rounds(calls)
    for row, us, theirs in zip(rows, times[::2], times[1::2], strict=True):
        row |= {"us": us, "deep_gemm_us": theirs, "speed": theirs / us}
    return rows


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """`new`, and before them the rows of `old` with other (N, K)."""
    measured = {(row["n"], row["k"]) for row in new}
    return [row for row in old if (row["n"], row["k"]) not in measured] + list(new)


def by_kind(rows: Sequence[Row]) -> str:
    """A table with a line for each layout and number of groups."""
    cells = []
    for key, of in by(rows, "layout", "groups").items():
        speeds = [row["speed"] for row in of]
        below = sum(speed < GOAL for speed in speeds)
        cells.append((*key, len(speeds), f"{mean(speeds):.2f}", span(speeds), below))
    columns = "layout", "groups", "points", "speed, geometric mean", "worst to best", f"below {GOAL}"
    return table(columns, cells)


def main() -> None:
    """Run the sweep."""
    options = _options()
    expect_gpu("benchmarks gemm_sweep")
    if not deep_gemm_peer.available():
        sys.exit("benchmarks gemm_sweep: expected DeepGEMM's wheel (sgl-deep-gemm), got none")
    work: dict[Point, list[list[Shape]]] = {
        point: batches(point, options.coarse) for point in options.points or all_points()
    }
    begin = time.perf_counter()
    every = [batch for of_point in work.values() for batch in of_point]
    deep_gemm_peer.compile_ahead(every)
    kernels.resolve_backend("hopper").warm_up()
    print(f"compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    about = header() | {"copy_tbps": copy_bandwidth(), "deep_gemm": deep_gemm_peer.version()}
    pool = Pool(max(s.num_groups * s.n * s.k for batch in every for s in batch) + (1 << 28))
    old, rows = earlier(options.json), list[Row]()
    result = Result(options.json, about)
    for of_point in work.values():
        new = [row for batch in of_point for row in measure(batch, pool)]
        rows += new
        print("\n".join(map(line_of, new)), flush=True)
        result.rows = merged(old, rows)
        result.write()
    print(by_kind(rows), "worst:", sep="\n")
    for row in sorted(rows, key=lambda row: float(row["speed"]))[:20]:
        print(line_of(row))
    print(f"largest difference from DeepGEMM {max(row['diff'] for row in rows):.1e}")
    print(f"{time.perf_counter() - begin:.0f} s in all")


def _options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--coarse", action="store_true", help="fewer rows, and only 1 and 2 groups")
    parser.add_argument("--points", type=parse_point, nargs="+", metavar="N,K", help="only these (N, K)")
    return parser.parse_args()


def _row(shape: Shape) -> Row:
    return {
        "layout": shape.layout.value, "groups": shape.num_groups, "rows": shape.rows[0],
        "n": shape.n, "k": shape.k,
    }  # fmt: skip
