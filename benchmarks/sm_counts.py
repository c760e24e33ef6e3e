"""SM count benchmark: `python -m benchmarks.sm_counts [--num-sms 132,114,78,66,20] [--json FILE]`.

One row per compute-bound shape (band 'contiguous large' of benchmarks.grouped_gemm) and SM count: kernel
time as measured there, in a green context of that many SMs, rounded up to what the driver grants (114 and
78 are the SMs of an H100 PCIe and of an H20); and time * SMs over the same product with all SMs of the
device. That is 1 if time is inversely proportional to SMs, and below 1 if each SM does more when fewer
work. Clocks are not locked.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.grouped_gemm import KERNEL
from benchmarks.problem import Pool
from benchmarks.shapes import SEED, Shape, all_shapes
from benchmarks.timing import copy_bandwidth, expect_gpu, header, kernel_microseconds
from expertd import kernels
from expertd.kernels.partitions import SMPartitions

Row = dict[str, Any]
BAND = "contiguous large"
SM_COUNTS = (132, 114, 78, 66, 20)


def measure(
    shape: Shape, pool: Pool, sm_counts: tuple[int, ...], all_sms: int, limited_to: "LimitedTo"
) -> list[Row]:
    """A shape's rows of the table, one per SM count."""
    problem = pool.problem(shape)
    times: dict[int, tuple[int, float]] = {}  # granted SMs and us
    for asked in dict.fromkeys((all_sms, *sm_counts)):
        with limited_to(asked) as num_sms:
            times[asked] = num_sms, kernel_microseconds(partial(problem.run, num_sms), KERNEL)
    rows = []
    for num_sms, us in map(times.__getitem__, sm_counts):
        rows.append({
            "shape": shape.label, "n": shape.n, "k": shape.k, "rows": list(shape.rows), "num_sms": num_sms,
            "us": us, "tflops": shape.flops / us / 1e6,
            "ratio": us * num_sms / (times[all_sms][1] * all_sms),
        })  # fmt: skip
    return rows


LimitedTo = Callable[[int], AbstractContextManager[int]]
"""Within it, torch's current stream has at least the given number of SMs, which it returns, and no others."""


def in_green_contexts(partitions: SMPartitions) -> LimitedTo:
    """The streams of partitions, one at a time; torch's own stream for all SMs."""

    @contextmanager
    def limited_to(num_sms: int) -> Iterator[int]:
        sizes = {} if num_sms == partitions.total_sms else {"measured": num_sms}
        made = partitions.apply(sizes)
        name = made[0].name if made else None
        with torch.cuda.stream(partitions.stream(name)):
            yield partitions.num_sms(name)

    return limited_to


def print_rows(rows: list[Row]) -> None:
    cells = ["{num_sms:>4} SMs {us:>8.1f} us x{ratio:.3f}".format(**row) for row in rows]
    print(f"{rows[0]['shape']:<28} " + "  ".join(cells), flush=True)


def print_means(rows: list[Row]) -> None:
    for num_sms in dict.fromkeys(row["num_sms"] for row in rows):
        ratios = [row["ratio"] for row in rows if row["num_sms"] == num_sms]
        mean = statistics.geometric_mean(ratios)
        print(
            f"{num_sms:>4} SMs  {len(ratios)} shapes, time * SMs over that with all: "
            f"geometric mean {mean:.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
        )


def parse_sm_counts(text: str) -> tuple[int, ...]:
    """Parse --num-sms."""
    counts = tuple(int(word) if word.strip().isdecimal() else 0 for word in text.split(","))
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"expected SM counts of at least 1, as in 132,66, got {text!r}")
    return counts


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write header and rows here")
    parser.add_argument(
        "--num-sms", type=parse_sm_counts, default=SM_COUNTS, help="SM counts, separated by commas"
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, help="seed of the expert loads (default: %(default)s)"
    )
    options = parser.parse_args()
    expect_gpu("benchmarks.sm_counts")
    all_sms = torch.cuda.get_device_properties(0).multi_processor_count
    if max(options.num_sms) > all_sms:
        sys.exit(
            f"benchmarks.sm_counts: expected at most the device's {all_sms} SMs, got {max(options.num_sms)}"
        )
    kernels.resolve_backend("hopper").warm_up()
    limited_to = in_green_contexts(SMPartitions(0))
    about: Row = header() | {
        "copy_tbps": copy_bandwidth(),
        "seed": options.seed,
        "method": "kernel time by CUPTI in a green context, cold L2, median of 20",
    }
    print("  ".join(f"{key}: {value}" for key, value in about.items()))
    shapes = [shape for shape in all_shapes(options.seed) if shape.band == BAND]
    pool = Pool(max(s.num_groups * s.n * s.k for s in shapes) + (1 << 28))
    rows: list[Row] = []
    for shape in shapes:
        measured = measure(shape, pool, options.num_sms, all_sms, limited_to)
        print_rows(measured)
        rows += measured
    print_means(rows)
    if options.json:
        options.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
