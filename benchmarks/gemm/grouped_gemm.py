"""Grouped GEMM benchmark: `python -m benchmarks grouped_gemm [--json FILE] [--band WORD] [--compare FILE]`.

One row per shape: kernel time (CUPTI, L2 flushed by a 512 MB fill before each call, median of 20), TFLOPS and
TB/s over the real rows, time over the floor max(bytes / copy bandwidth, operations / 1480 TFLOPS), and, if
DeepGEMM's wheel is installed, the speed relative to DeepGEMM on the same rows in the same run. Then the
largest shapes' watts, MHz and pJ/FLOP (`power`).

--weights mxfp4 adds groups of 1 to 512 rows each, and to each row of the table `weights`: the time with MXFP4
weights, and with the same numbers in FP8 (`speed`: the latter over the former), after the outputs' bits have
been found equal. With int4 (groups of 32, scales in BF16), int4_g128 (F16) and nvfp4, whose numbers FP8 has
not, the FP8 weights are others of the same size, and outputs are compared with products of decoded weights.

--compare prints the shapes that got slower than in a committed FILE by more than noise (`compare` says how
much that is), each measured again before, and exits with 1 if there are any.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gemm import compare, deep_gemm_peer, power
from benchmarks.gemm.problem import Pool, Problem, random_four_bits, random_mxfp4
from benchmarks.gemm.shapes import SEED, Shape, all_shapes, even_shapes
from benchmarks.layer.moe_layer import difference
from benchmarks.lib.markdown import by, mean, span, table
from benchmarks.lib.nvml import Nvml, Sensor
from benchmarks.lib.run import Result, line_of, new_parser
from benchmarks.lib.timing import copy_bandwidth, cublas_fp8_tflops, expect_gpu, header, kernel_microseconds
from benchmarks.peers import Peer, available_peers
from expertd import kernels
from expertd.kernels.backends.hopper.packed_weights import pack, unpack_mxfp4
from expertd.kernels.ops.four_bits import groups_of
from expertd.weight_format import WeightFormat, WeightLayout

Row = dict[str, Any]
PEAK_TFLOPS = 1480.0
KERNEL = "grouped_gemm"
TOLERANCE = 1e-4  # of a peer's output, as `difference`
FOUR_BITS = {
    "mxfp4": WeightLayout(WeightFormat.MXFP4, 32, "U8"),
    "int4": WeightLayout(WeightFormat.INT4, 32, "BF16"),
    "int4_g128": WeightLayout(WeightFormat.INT4, 128, "F16"),
    "nvfp4": WeightLayout(WeightFormat.NVFP4, 16, "F8_E4M3"),
}


def measure(shape: Shape, pool: Pool, with_peer: bool, bandwidth: float) -> Row:
    """One row of the table."""
    problem = pool.problem(shape)
    problem.out.fill_(math.nan)
    ours = kernel_microseconds(problem.run, KERNEL)
    row: Row = {
        "shape": shape.label, "band": shape.band, "n": shape.n, "k": shape.k, "rows": list(shape.rows),
        "us": ours, "tflops": shape.flops / ours / 1e6, "tbps": shape.bytes / ours / 1e6,
        "over_floor": ours / floor(shape, shape.bytes, bandwidth),
    }  # fmt: skip
    if with_peer:
        call, result = deep_gemm_peer.prepare(problem)
        row["deep_gemm_us"] = kernel_microseconds(call, deep_gemm_peer.KERNEL)
        row["speed"] = row["deep_gemm_us"] / ours
        row["diff"] = difference(problem.real_rows(problem.run()), result())
    return row


def floor(shape: Shape, num_bytes: int, bandwidth: float) -> float:
    """The microseconds that moving these bytes, or the operations, take at least."""
    return max(num_bytes / bandwidth / 1e6, shape.flops / PEAK_TFLOPS / 1e6)


def measure_mxfp4(problem: Problem, bandwidth: float) -> Row:
    """The problem with random MXFP4 weights, beside the same numbers in FP8. Exits if their bits differ."""
    shape, weights = problem.shape, random_mxfp4(problem.b.data)
    decoded = unpack_mxfp4(pack(weights), shape.k)
    bits, times = [], []
    for b in (decoded, weights):
        problem.out.fill_(math.nan)
        bits.append(problem.real_rows(problem.run(b=b)).view(torch.int16).clone())
        times.append(kernel_microseconds(lambda b=b: problem.run(b=b), KERNEL))  # type: ignore[misc]
    if not torch.equal(*bits):
        sys.exit(f"{shape.label}: expected the bits of FP8 weights from MXFP4, got others")
    fp8, ours = times
    return _beside_fp8(shape, FOUR_BITS["mxfp4"], fp8, ours, bandwidth)


def measure_others(problem: Problem, layout: WeightLayout, bandwidth: float) -> Row:
    """The problem with random weights of this layout, beside its own in FP8. Exits if the output is wrong."""
    shape, weights = problem.shape, random_four_bits(problem.b.data, layout)
    problem.out.fill_(math.nan)
    got = torch.split(problem.real_rows(problem.run(b=weights)), list(shape.rows))
    data = problem.real_rows(problem.a.data.view(torch.uint8)).view(torch.float8_e4m3fn)
    rows = torch.split(kernels.dequantize_rows(data, problem.real_rows(problem.a.scales)), list(shape.rows))
    for own, of_group, found in zip(groups_of(weights), rows, got, strict=True):
        wrong = difference(found, of_group @ kernels.decode(own).t()) if len(found) else 0
        if not wrong < TOLERANCE:
            sys.exit(f"{shape.label}: expected less than {TOLERANCE} from decoded weights, got {wrong:.1e}")
    fp8 = kernel_microseconds(problem.run, KERNEL)
    ours = kernel_microseconds(lambda: problem.run(b=weights), KERNEL)
    return _beside_fp8(shape, layout, fp8, ours, bandwidth)


def _beside_fp8(shape: Shape, layout: WeightLayout, fp8: float, ours: float, bandwidth: float) -> Row:
    num_bytes = shape.bytes_with(layout)
    return {
        "format": layout.format, "group_size": layout.group_size,
        "us": ours, "fp8_us": fp8, "speed": fp8 / ours,
        "tbps": num_bytes / ours / 1e6, "over_floor": ours / floor(shape, num_bytes, bandwidth),
    }  # fmt: skip


def measure_peers(problem: Problem, others: Sequence[Peer]) -> dict[str, float]:
    """us of each of these peers that takes the shape, by name; says why the others do not."""
    times = {}
    for peer in others:
        try:
            call, result = peer.prepare(problem)
            times[peer.name] = kernel_microseconds(call, peer.kernel)
            diff = difference(problem.real_rows(problem.run()), result()) if peer.same else 0
            if not diff < TOLERANCE:
                raise RuntimeError(f"output: expected less than {TOLERANCE} from ours, got {diff:.1e}")
        except Exception as error:  # one peer must not end the run
            times.pop(peer.name, None)
            print(f"{problem.shape.label:<28} {peer.name}: {str(error).partition(chr(10))[0]}", flush=True)
    return times


def by_band(rows: Sequence[Row]) -> str:
    """A table with a line for each band of shapes; without DeepGEMM, it has no speeds."""
    cells = []
    for (band,), of in by(rows, "band").items():
        speeds = [row["speed"] for row in of if "speed" in row]
        speed = (f"{mean(speeds):.2f}", span(speeds)) if speeds else ("", "")
        over = f"{mean(row['over_floor'] for row in of):.2f}"
        best = f"{max(row['tflops'] for row in of):.0f}", f"{max(row['tbps'] for row in of):.2f}"
        cells.append((band, len(of), *speed, over, *best))
    columns = "band", "shapes", "speed, geometric mean", "worst to best", "time over the floor"
    return table((*columns, "best TFLOPS", "best TB/s"), cells)


def by_weights(rows: Sequence[Row]) -> str:
    """A table of the other weights' speed over FP8, with a line for each band of shapes."""
    cells = []
    for (band,), of in by(rows, "band").items():
        found = [row["weights"] for row in of]
        speeds = [each["speed"] for each in found]
        over = f"{mean(each['over_floor'] for each in found):.2f}"
        best = f"{max(each['tbps'] for each in found):.2f}"
        cells.append((band, len(of), f"{mean(speeds):.2f}", span(speeds), over, best))
    columns = "speed over FP8, geometric mean", "worst to best", "time over the floor", "best TB/s"
    return table(("band", "shapes", *columns), cells)


def main() -> None:
    """Run the benchmark."""
    options = _options()
    expect_gpu("benchmarks grouped_gemm")
    shapes = all_shapes(options.seed) + (even_shapes() if options.weights else [])
    shapes = [shape for shape in shapes if options.band in shape.band]
    before = committed_rows(options.compare, shapes) if options.compare else {}
    sensor = Nvml() if options.power else None
    others = available_peers() if options.peers else ()
    with_peer = not options.no_peer and deep_gemm_peer.available()
    if with_peer:
        deep_gemm_peer.compile_ahead([[shape] for shape in shapes])
    kernels.resolve_backend("hopper").warm_up()
    about: Row = header() | {
        "copy_tbps": copy_bandwidth(),
        "cublas_fp8_tflops": cublas_fp8_tflops(),
        "seed": options.seed,
    }
    result = Result(options.json, about)
    pool = Pool(max(s.num_groups * s.n * s.k for s in shapes) + (1 << 28))
    rows = result.rows
    for shape in shapes:
        row = measure(shape, pool, with_peer, about["copy_tbps"])
        if others:
            row["peers_us"] = measure_peers(pool.problem(shape), others)
        if options.weights:
            problem, tbps = pool.problem(shape), about["copy_tbps"]
            layout, is_mxfp4 = FOUR_BITS[options.weights], options.weights == "mxfp4"
            measured = measure_mxfp4(problem, tbps) if is_mxfp4 else measure_others(problem, layout, tbps)
            row["weights"] = measured
        result.put(row)
    print(by_band(rows))
    if options.weights:
        print(by_weights(rows))
    if sensor:
        for index in largest(shapes, options.power):
            rows[index]["power"] = measure_power(shapes[index], pool, with_peer, sensor)
            print(line_of({"shape": rows[index]["shape"], **rows[index]["power"]}), flush=True)
            result.write()
    if options.compare:
        again = lambda index: measure(shapes[index], pool, with_peer, about["copy_tbps"])  # noqa: E731
        found = compare.slower_rows(rows, before, again)
        compared = compare.count_compared(rows, before)
        print(compare.describe(found, compared, len(rows) - compared, options.compare))
        sys.exit(1 if found else 0)


def largest(shapes: Sequence[Shape], count: int) -> list[int]:
    """The indices of the `count` shapes with the most operations, those first."""
    return sorted(range(len(shapes)), key=lambda index: -shapes[index].flops)[:count]


def measure_power(shape: Shape, pool: Pool, with_peer: bool, sensor: Sensor) -> Row:
    """The shape's watts, MHz and pJ/FLOP."""
    problem = pool.problem(shape)
    theirs = deep_gemm_peer.prepare(problem)[0] if with_peer else None
    return power.measure(problem.run, theirs, shape.flops, sensor)


def committed_rows(file: Path, shapes: Sequence[Shape]) -> Mapping[compare.Key, Row]:
    """The rows to compare with. Exits with a message if the file has none of the shapes."""
    try:
        before = compare.committed(file)
    except (OSError, ValueError) as error:
        sys.exit(f"benchmarks grouped_gemm --compare: {error}")
    if not any((shape.label, shape.rows) in before for shape in shapes):
        sys.exit(f"benchmarks grouped_gemm --compare: expected shapes of this run in {file}, got others")
    return before


def _options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--band", default="", help="only bands whose name contains this")
    parser.add_argument("--no-peer", action="store_true", help="skip DeepGEMM")
    parser.add_argument("--peers", action="store_true", help="measure what else is installed, too")
    parser.add_argument("--weights", choices=FOUR_BITS, help="measure such weights beside FP8, too")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="a committed result")
    parser.add_argument(
        "--power", type=int, default=4, metavar="N",
        help="measure watts and MHz of the N largest shapes, some 8 s each (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=int, default=SEED, help="seed of the expert loads (default: %(default)s)"
    )
    return parser.parse_args()
