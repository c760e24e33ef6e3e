"""The points of the sweep: rows of every group x (N, K) of six models' GEMMs x 1, 2 and 4 groups."""

import argparse
from dataclasses import dataclass

from benchmarks.gemm.shapes import Shape
from expertd.layout import Layout

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
        [_shape(layout, num_groups, height, point) for height in rows if height <= most]
        for layout, most in ((Layout.CONTIGUOUS, max(rows)), (Layout.MASKED, MASKED_MAX_ROWS))
        for num_groups in groups
    ]


def _shape(layout: Layout, num_groups: int, rows: int, point: Point) -> Shape:
    """Every group has the same number of rows."""
    max_m = -(-rows // 128) * 128 if layout is Layout.MASKED else 0
    return Shape("sweep", layout, (rows,) * num_groups, point.n, point.k, max_m)
