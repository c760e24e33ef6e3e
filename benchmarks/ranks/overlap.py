"""A layer with and without combine under its down GEMM: `python -m benchmarks overlap [--json FILE]`.

One process a GPU, as in `benchmarks parallel`, whose problems these are. For each number of SMs that combine
gets, a row has the whole layer overlapped; and, the same in all of them, without overlap, dispatch and
combine alone, and the layer of one GPU with the same work. All are replayed as CUDA graphs; `rank_timing`
says how they are timed. The output has to have the same bits with and without overlap.

exposed  the part of dispatch and combine that is not hidden: (overlapped - one GPU) / dispatch and combine;
         exposed_without has the layer without overlap

Then torch's profiler says when each launch ran in a step of the largest number of tokens, with the number of
SMs that was fastest; --trace FILE writes that for https://ui.perfetto.dev. Rows and steps of other numbers
of GPUs stay in the file.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.layer.problem import LAYERS, LayerProblem, make_problem, make_weights
from benchmarks.lib.processes import free_port
from benchmarks.lib.run import new_parser
from benchmarks.lib.timing import expect_gpu
from benchmarks.ranks import rank_timing
from benchmarks.ranks.overlap_timeline import Event, chrome_trace, profiled_kernels, step_of
from benchmarks.ranks.parallel import RankProblem, enter, leave, measure_call
from benchmarks.ranks.parallel_options import about
from benchmarks.ranks.rank_timing import Ranks
from benchmarks.ranks.rank_tokens import all_experts, draw_experts, same_work
from expertd.kernels.overlap import Overlap

Row = dict[str, Any]
TOKENS = (1024, 4096)
SMS = (16, 24, 32, 40)


def measure(own: LayerProblem, ranks: Ranks, overlaps: Sequence[Overlap]) -> list[Row]:
    """A row for each overlap; collective."""
    problem, counts = rank_problem(own, ranks)
    same = same_work(own, all_experts(problem.topk_ids, counts, ranks), ranks.rank)
    common: Row = {"layer": own.layer.name, "tokens": len(own.hidden_states), "gpus": ranks.count}
    for name, call in (("exchange", problem.exchange), ("layer", problem.layer), ("one_gpu", same.run)):
        common[f"{name}_us"] = measure_call(call, problem, ranks)
    rows = []
    for overlap in overlaps:
        expect_same_bits(own, problem, ranks, overlap)
        row = common | {
            "communication_sms": overlap.communication.num_sms,
            "gemm_sms": overlap.gemms.num_sms,
            "overlapped_us": measure_call(partial(problem.layer, overlap), problem, ranks),
        }
        rows.append(row | exposed(row))
    return rows


def rank_problem(own: LayerProblem, ranks: Ranks) -> tuple[RankProblem, list[int]]:
    """Calls with as many tokens on each rank, and these numbers; collective."""
    layer, counts = own.layer, [len(own.hidden_states)] * ranks.count
    topk_ids = draw_experts(counts[0], ranks.count * layer.num_experts, layer.top_k, 0.0, "cuda")
    return RankProblem(own, topk_ids, counts, ranks), counts


def expect_same_bits(own: LayerProblem, problem: RankProblem, ranks: Ranks, overlap: Overlap) -> None:
    """Raise RuntimeError unless the layer writes the same with and without overlap; collective."""
    written = []
    for each in (None, overlap):
        own.out.fill_(torch.nan)
        torch.cuda.synchronize()
        ranks.meet()
        problem.layer(each)
        problem.check()
        written.append(own.out.clone())
    without, overlapped = written
    others = int((without.view(torch.int16) != overlapped.view(torch.int16)).sum())
    missing = int(without.isnan().sum())
    if others or missing:
        raise RuntimeError(
            f"rank {ranks.rank}, {overlap.communication.num_sms} SMs for communication: expected the bits "
            f"without overlap, got {others} others of {without.numel()}; without overlap, {missing} NaN"
        )


def exposed(row: Mapping[str, Any]) -> Row:
    """What of dispatch and combine a layer's time has beside that of one GPU: with overlap, and without."""
    return {
        name: (row[f"{layer}_us"] - row["one_gpu_us"]) / row["exchange_us"]
        for name, layer in (("exposed_without", "layer"), ("exposed", "overlapped"))
    }


def timeline(given: Namespace, ranks: Ranks, overlaps: Sequence[Overlap], rows: Sequence[Row]) -> Row:
    """When the launches of all ranks ran in one step, and which step it is; collective."""
    layer, tokens = given.layers[0], max(given.tokens)
    of_step = [row for row in rows if (row["layer"], row["tokens"]) == (layer.name, tokens)]
    best = min(range(len(overlaps)), key=lambda place: float(of_step[place]["overlapped_us"]))
    own = make_problem(layer, make_weights(layer), tokens)
    problem, _ = rank_problem(own, ranks)
    ranks.meet()
    trace = profiled_kernels(partial(problem.layer, overlaps[best]), ranks)
    problem.check()
    every: list[list[Event]] = [[] for _ in range(ranks.count)]
    dist.all_gather_object(every, step_of(trace, ranks.rank), group=ranks.group)
    kept = "layer", "tokens", "communication_sms", "gemm_sms"
    return {key: of_step[best][key] for key in kept} | {"events": [e for events in every for e in events]}


def merged(
    before: Mapping[str, Any], machine: Mapping[str, Any], rows: Sequence[Row], timelines: Mapping[str, Row]
) -> dict[str, Any]:
    """A file's content with these rows, and with a timeline for each of these numbers of GPUs.

    A row replaces that of the same layer, GPUs, tokens and SMs.
    """
    keys = "layer", "gpus", "tokens", "communication_sms"
    found = {tuple(row[key] for key in keys): row for row in (*before.get("rows", ()), *rows)}
    return {
        "about": machine,
        "rows": [found[each] for each in sorted(found)],
        "timeline": {**before.get("timeline", {}), **timelines},
    }


def write(file: Path | None, *new: Any) -> None:
    """Merge into the file, if there is to be one."""
    if file is not None:
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(merged(before, *new), indent=1) + "\n")


def run(rank: int, num_ranks: int, port: int, given: Namespace) -> None:
    """All rows and the timeline, on one rank."""
    ranks = enter(rank, num_ranks, rank, port)
    machine = about(given, num_ranks) | {"method": rank_timing.METHOD}
    overlaps = [Overlap.of(rank, sms) for sms in given.sms]
    rows: list[Row] = []
    for layer in given.layers:
        weights = make_weights(layer)
        for num_tokens in given.tokens:
            measured = measure(make_problem(layer, weights, num_tokens), ranks, overlaps)
            rows += measured
            if rank == 0:
                print(*map(json.dumps, measured), sep="\n", flush=True)
                write(given.json, machine, rows, {})
    step = timeline(given, ranks, overlaps, rows)
    if rank == 0:
        write(given.json, machine, rows, {str(num_ranks): step})
        if given.trace is not None:
            given.trace.write_text(json.dumps(chrome_trace(step["events"])) + "\n")
    leave(ranks)


def options(arguments: Sequence[str] | None = None) -> Namespace:
    """The options; `layers` are those whose names contain a word."""
    parser = new_parser(__doc__)
    parser.add_argument("--ranks", type=int, help="GPUs; default: all")
    parser.add_argument("--layer", default="deepseek", help="only layers whose name contains this")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="of each GPU")
    parser.add_argument("--sms", type=int, nargs="+", default=SMS, help="for communication; rounded up")
    parser.add_argument("--trace", type=Path, help="write the timeline here, for https://ui.perfetto.dev")
    given = parser.parse_args(arguments)
    given.layers = [layer for layer in LAYERS if given.layer in layer.name]
    given.peers = []
    if not given.layers:
        sys.exit(f"--layer: expected a part of {', '.join(x.name for x in LAYERS)}, got {given.layer!r}")
    for name in ("tokens", "sms"):
        if min(getattr(given, name)) < 1:
            sys.exit(f"--{name}: expected numbers of at least 1, got {min(getattr(given, name))}")
    if given.ranks is not None and not 2 <= given.ranks <= 8:
        sys.exit(f"--ranks: expected 2 to 8, got {given.ranks}")
    return given


def main() -> int:
    """Start a process for each GPU."""
    given = options()
    expect_gpu("benchmarks overlap")
    count = given.ranks or torch.cuda.device_count()
    if not 2 <= count <= torch.cuda.device_count():
        sys.exit(f"benchmarks overlap: expected {max(2, count)} GPUs, got {torch.cuda.device_count()}")
    arguments = count, free_port(), given
    multiprocessing.spawn(run, arguments, count)  # type: ignore[attr-defined, no-untyped-call]
    return 0
