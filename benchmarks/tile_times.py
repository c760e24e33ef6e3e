"""Every tile of the grouped GEMM on many shapes: `python -m benchmarks.tile_times [--json FILE]`.

Shows what `plans.choose` leaves on the table, and that all tiles give the same bits. Contiguous layout;
kernel times by CUPTI, L2 flushed before each launch. All tiles, the chosen plan, and DeepGEMM if its wheel is
there, take turns; each figure is the better of two medians of 5.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import deep_gemm_peer
from benchmarks.grouped_gemm import KERNEL
from benchmarks.problem import Pool, Problem
from benchmarks.shapes import Shape
from benchmarks.timing import best_of_turns, expect_gpu, header
from expertd import kernels
from expertd.kernels.backends.hopper import tiles
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm, Groups
from expertd.kernels.backends.hopper.launch import Kernels, current_stream
from expertd.kernels.backends.hopper.plans import Plan
from expertd.layout import Layout

Row = dict[str, Any]

# (groups, rows of each, N, K)
SHAPES = [
    *((1, m, 4096, 7168) for m in (1, 16, 33, 70, 129, 200, 300, 512, 1000, 1186)),
    *((1, m, 3072, 5120) for m in (16, 70, 300, 1000)),
    *((1, m, 6144, 7168) for m in (1, 200, 512, 1000)),
    *((2, m, 6144, 7168) for m in (70, 200, 512)),
    *((2, m, 3072, 5120) for m in (200, 512, 1000)),
    *((4, m, 3072, 5120) for m in (200, 512)),
    *((1, m, 7168, 2048) for m in (16, 70, 200, 512)),
    *((1, m, 2048, 768) for m in (16, 70, 512)),
    *((1, m, 1536, 2048) for m in (16, 512)),
    (32, 40, 4096, 7168),
    (32, 100, 4096, 7168),
    (128, 40, 2048, 768),
    (64, 128, 4096, 2048),
    (8, 1000, 4096, 7168),
    (8, 1000, 7168, 2048),
    (4, 4096, 4096, 7168),
    (4, 4096, 7168, 2048),
    (16, 512, 4096, 7168),
    (16, 512, 7168, 2048),
    (32, 200, 6144, 7168),
    (32, 256, 4096, 7168),
    (32, 256, 7168, 2048),
    (128, 256, 1536, 2048),
    (32, 1024, 4096, 7168),
    (32, 1024, 7168, 2048),
]


def plans(shape: Shape) -> dict[str, Plan]:
    """A plan for each tile that suits the shape and each of its heights, by name."""
    rows = max(shape.rows)
    found = {}
    for config in tiles.CONFIGS:
        if config.block_m == 64 and (rows > 1000 or (config.swap_ab and rows > 200)):
            continue
        heights = [config.steps] if config.swap_ab else range(1, config.steps + 1)
        for steps in heights:
            if steps == 1 or (steps - 1) * config.step < rows:
                found[f"{config.name}/{steps}"] = Plan(config, 16 * steps)
    return found


def measure(shape: Shape, pool: Pool, loaded: Kernels) -> Row:
    """A row: times in us by tile, and the tiles whose bits differ from the chosen plan's."""
    problem = pool.problem(shape)
    calls = {name: _call(problem, loaded, plan) for name, plan in plans(shape).items()}
    problem.out.fill_(math.nan)
    expected = problem.run().clone()
    wrong = []
    for name, call in calls.items():
        problem.out.fill_(math.nan)
        call()
        if not torch.equal(problem.out, expected):
            wrong.append(name)
    named = [(call, KERNEL) for call in calls.values()]
    others: dict[str, tuple[Callable[[], object], str]] = {"chosen": (problem.run, KERNEL)}
    if deep_gemm_peer.available():
        others["DeepGEMM"] = (deep_gemm_peer.prepare(problem)[0], deep_gemm_peer.KERNEL)
    times = best_of_turns([*named, *others.values()], 5)
    return {
        "groups": shape.num_groups, "rows": shape.rows[0], "n": shape.n, "k": shape.k,
        "us": dict(zip([*calls, *others], times, strict=True)), "wrong": wrong,
    }  # fmt: skip


def line_of(row: Row) -> str:
    """A row as a line of text, the fastest tile first."""
    fastest = sorted(row["us"].items(), key=lambda item: item[1])
    times = "  ".join(f"{name} {us:.1f}" for name, us in fastest)
    wrong = f"  OTHER BITS: {', '.join(row['wrong'])}" if row["wrong"] else ""
    return "g{groups} m{rows} {n}x{k}: ".format(**row) + times + wrong


def main() -> None:
    """Run all shapes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write header and rows here")
    parser.add_argument("--groups", type=int, nargs="+", help="only shapes with these numbers of groups")
    options = parser.parse_args()
    expect_gpu("benchmarks.tile_times")
    chosen = [shape for shape in SHAPES if not options.groups or shape[0] in options.groups]
    shapes = [Shape("tiles", Layout.CONTIGUOUS, (m,) * g, n, k, 0) for g, m, n, k in chosen]
    if deep_gemm_peer.available():
        deep_gemm_peer.compile_ahead([[shape] for shape in shapes])
    kernels.resolve_backend("hopper").warm_up()
    about = header()
    print("  ".join(f"{key}: {value}" for key, value in about.items()))
    pool = Pool(max(s.num_groups * s.n * s.k for s in shapes) + (1 << 28))
    loaded, rows = Kernels(), []
    for shape in shapes:
        rows.append(measure(shape, pool, loaded))
        print(line_of(rows[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    if any(row["wrong"] for row in rows):
        raise SystemExit("some tiles give other bits")


def _call(problem: Problem, loaded: Kernels, plan: Plan) -> Callable[[], object]:
    gemm, on = GroupedGemm(loaded, lambda *_: plan), current_stream(0)
    groups = Groups(problem.extents)
    shape = problem.shape
    return lambda: gemm.multiply(
        on, shape.layout, problem.a, problem.b, groups, problem.out, float(shape.rows[0]), None
    )


if __name__ == "__main__":
    main()
