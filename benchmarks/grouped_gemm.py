"""Grouped GEMM benchmark: `python -m benchmarks.grouped_gemm [--json FILE] [--band WORD] [--no-peer]`.

One row per shape: kernel time (CUPTI, L2 flushed by a 512 MB fill before each call, median of 20), TFLOPS and
TB/s over the real rows, time over the floor max(bytes / copy bandwidth, operations / 1480 TFLOPS), and, if
DeepGEMM's wheel is installed, the speed relative to DeepGEMM on the same rows in the same run.
"""

import argparse
import json
import math
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks import deep_gemm_peer
from benchmarks.problem import Pool
from benchmarks.shapes import SEED, Shape, all_shapes
from benchmarks.timing import copy_bandwidth, cublas_fp8_tflops, expect_gpu, header, kernel_microseconds
from expertd import kernels

Row = dict[str, Any]
PEAK_TFLOPS = 1480.0
KERNEL = "grouped_gemm"


def measure(shape: Shape, pool: Pool, with_peer: bool, bandwidth: float) -> Row:
    """One row of the table."""
    problem = pool.problem(shape)
    problem.out.fill_(math.nan)
    ours = kernel_microseconds(problem.run, KERNEL)
    floor = max(shape.bytes / bandwidth / 1e6, shape.flops / PEAK_TFLOPS / 1e6)
    row: Row = {
        "shape": shape.label, "band": shape.band, "n": shape.n, "k": shape.k, "rows": list(shape.rows),
        "us": ours, "tflops": shape.flops / ours / 1e6, "tbps": shape.bytes / ours / 1e6,
        "over_floor": ours / floor,
    }  # fmt: skip
    if with_peer:
        call, result = deep_gemm_peer.prepare(problem)
        row["deep_gemm_us"] = kernel_microseconds(call, deep_gemm_peer.KERNEL)
        row["speed"] = row["deep_gemm_us"] / ours
        x, y = problem.real_rows(problem.run()).double(), result().double()
        row["diff"] = float(1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum()))
    return row


def print_row(row: Row) -> None:
    line = "{shape:<28} {us:>8.1f} us {tflops:>6.0f} TF {tbps:>5.2f} TB/s  x{over_floor:.2f} of floor".format(
        **row
    )
    if "speed" in row:
        line += "  DeepGEMM {deep_gemm_us:>8.1f} us  speed {speed:.3f}  diff {diff:.1e}".format(**row)
    print(line, flush=True)


def print_means(rows: list[Row]) -> None:
    for band in dict.fromkeys(str(row["band"]) for row in rows):
        speeds = [row["speed"] for row in rows if row["band"] == band and "speed" in row]
        floors = [row["over_floor"] for row in rows if row["band"] == band]
        line = f"{band:<20} {len(floors):>3} shapes, geometric mean x{_mean(floors):.3f} of floor"
        if speeds:
            line += (
                f", speed over DeepGEMM {_mean(speeds):.3f}, worst {min(speeds):.3f}, best {max(speeds):.3f}"
            )
        print(line)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write header and rows here")
    parser.add_argument("--band", default="", help="only bands whose name contains this")
    parser.add_argument("--no-peer", action="store_true", help="skip DeepGEMM")
    parser.add_argument(
        "--seed", type=int, default=SEED, help="seed of the expert loads (default: %(default)s)"
    )
    options = parser.parse_args()
    expect_gpu("benchmarks.grouped_gemm")
    shapes = [shape for shape in all_shapes(options.seed) if options.band in shape.band]
    with_peer = not options.no_peer and deep_gemm_peer.available()
    if with_peer:
        _compile_peer(shapes)
    kernels.resolve_backend("hopper").warm_up()
    about: Row = header() | {
        "copy_tbps": copy_bandwidth(),
        "cublas_fp8_tflops": cublas_fp8_tflops(),
        "seed": options.seed,
    }
    print("  ".join(f"{key}: {value}" for key, value in about.items()))
    pool = Pool(max(s.num_groups * s.n * s.k for s in shapes) + (1 << 28))
    rows = []
    for shape in shapes:
        rows.append(measure(shape, pool, with_peer, about["copy_tbps"]))
        print_row(rows[-1])
    print_means(rows)
    if options.json:
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


def _compile_peer(shapes: list[Shape]) -> None:
    """Compile DeepGEMM's kernels, one per shape, with nvcc in parallel processes before anything is timed."""
    workers = min(12, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile_peer_one, shapes))


def _compile_peer_one(shape: Shape) -> None:
    pool = Pool(
        shape.num_groups * shape.n * shape.k + (sum(shape.rows) + shape.num_groups * shape.max_m) * shape.k
    )
    call, _ = deep_gemm_peer.prepare(pool.problem(shape))
    call()
    torch.cuda.synchronize()


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


if __name__ == "__main__":
    main()
