"""Layer benchmark: `python -m benchmarks moe_layer [--layer WORD] [--tokens N ...] [--json FILE]`.

One row per layer and number of tokens, routing given: our whole layer and, if DeepGEMM's wheel is installed,
its two grouped GEMMs alone on the same rows and its SM90 Mega MoE. All are replayed as CUDA graphs (ours is
also called from Python). Times are from CUDA events around the whole call; L2 is flushed by a 1 GB fill
before each call; median of 20. The contenders take turns, and each call comes after a pause, so that none
runs on a GPU that another has heated. Then the time of each of our stages (CUPTI: launches overlap, so a
stage lasts from the end of the preceding one to its own), and the time that a router in front adds. With
--models, the layers are gpt-oss-120b's (with biases and its activation, which no peer has), Qwen3-Next's and
GLM-5's. With --peers, the layers of `benchmarks.peers` that are installed take turns with the others.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.gemm import deep_gemm_peer
from benchmarks.layer import layer_peers
from benchmarks.layer.problem import LAYERS, MODELS, Layer, LayerProblem, make_problem, make_weights
from benchmarks.lib.run import Result, line_of, new_parser
from benchmarks.lib.timing import copy_bandwidth, expect_gpu, header, profiled
from benchmarks.peers import LayerPeer, available_layer_peers
from expertd.kernels import Routing, resolve_backend
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights

Row = dict[str, Any]
TOKENS = (1, 16, 64, 256, 1024, 4096)
BANDS = {"1 to 64": range(1, 65), "256 to 1024": range(256, 1025), "4096": range(4096, 4097)}
STAGES = {  # by the kernels of a call, in order
    "sort": "compute_permutation",
    "quantize": "quantize_permute",
    "gate_up": "grouped_gemm",
    "down": "grouped_gemm",
    "combine": "unpermute_rows",
}
PEERS = ("two_gemms", "mega_moe")
ROUTED = Layer("deepseek-v3", 7168, 2048, 256, 8)
ROUTED_TOKENS = (1, 16, 64, 256, 1024, 4096)
FLUSH_BYTES = 1 << 30
REPEATS, PAUSE_SECONDS = 20, 0.02
TOLERANCE = 5e-3  # of another layer's output, as `difference`: each rounds its own rows


def measure(problem: LayerProblem, with_peer: bool, others: Sequence[LayerPeer] = ()) -> Row:
    """One row of the table."""
    calls: dict[str, Callable[[], object]] = {"us": graph_of(problem.run), "eager_us": problem.run}
    has_mega_moe = with_peer and layer_peers.has_mega_moe() and problem.layer.is_common
    mega_moe = layer_peers.mega_moe(problem) if has_mega_moe else None
    if with_peer:
        calls["two_gemms_us"] = graph_of(layer_peers.two_gemms(problem))
    if mega_moe is not None:
        calls["mega_moe_us"] = graph_of(mega_moe)
    graphs, differences = prepare_peers(problem, others if problem.layer.is_common else ())
    times = microseconds([*calls.values(), *graphs.values()])
    row: Row = {"layer": problem.layer.name, "tokens": problem.hidden_states.shape[0]}
    row["activated_experts"] = len(set(problem.topk_ids.flatten().tolist()))
    row |= dict(zip(calls, times, strict=False))
    row |= ratios(row)
    if graphs:
        row["peers_us"] = dict(zip(graphs, times[len(calls) :], strict=True))
        row["peers_diff"] = differences
    if mega_moe is not None:
        problem.out.fill_(torch.nan)
        row["diff"] = difference(problem.run(), mega_moe())
    row["stages_us"] = _stages(calls["us"])
    return row


def prepare_peers(
    problem: LayerProblem, others: Sequence[LayerPeer]
) -> tuple[dict[str, Callable[[], object]], dict[str, float]]:
    """(graphs, differences from our output) of the peers that compute the layer; says why others do not."""
    graphs: dict[str, Callable[[], object]] = {}
    differences = {}
    for peer in others:
        try:
            call = peer.prepare(problem)
            found = difference(problem.run(), call())
            if not found < TOLERANCE:
                raise RuntimeError(f"output: expected less than {TOLERANCE} from ours, got {found:.1e}")
            graphs[peer.name] = graph_of(call)
            differences[peer.name] = found
        except Exception as error:  # one peer must not end the run
            tokens = problem.hidden_states.shape[0]
            reason = str(error).partition("\n")[0]
            print(f"{problem.layer.name:<16} {tokens:>5} tokens {peer.name}: {reason}", flush=True)
    return graphs, differences


def about_peers(others: Sequence[LayerPeer], layers: Sequence[Layer]) -> dict[str, Row]:
    """Each peer's version and, if it can be tuned, the layers for which its package has a configuration."""
    about: dict[str, Row] = {}
    for peer in others:
        about[peer.name] = {"version": peer.version()}
        if peer.tuned is not None:
            try:
                about[peer.name]["tuned"] = [layer.name for layer in layers if peer.tuned(layer)]
            except Exception as error:  # `prepare_peers` says more
                print(f"{peer.name}: {error}", flush=True)
    return about


def measure_router() -> list[Row]:
    """The time that choosing 8 of 256 experts by 4 of 8 groups adds to a layer whose routing is given."""
    weights = make_weights(ROUTED)
    router = torch.randn(ROUTED.num_experts, ROUTED.hidden_size, device="cuda") * ROUTED.hidden_size**-0.5
    bias = torch.rand(ROUTED.num_experts, device="cuda")
    shape = LayerShape(ROUTED.hidden_size, ROUTED.intermediate_size, ROUTED.num_experts, ROUTED.top_k)
    experts = ExpertWeights(router.to(torch.bfloat16), weights.gate_up, weights.down, bias)
    layer = MoELayer(
        shape,
        experts,
        resolve_backend("hopper"),
        routing=Routing("sigmoid", True, 2.5, num_expert_groups=8, topk_group=4),
    )
    rows = []
    for num_tokens in ROUTED_TOKENS:
        hidden_states = torch.randn(num_tokens, ROUTED.hidden_size, device="cuda").to(torch.bfloat16)
        routing = [tensor.clone() for tensor in layer.route(hidden_states)]
        calls = (
            graph_of(lambda h=hidden_states, r=routing: layer(h, *r)),  # type: ignore[misc]
            graph_of(lambda h=hidden_states: layer(h)),  # type: ignore[misc]
        )
        given, routed = microseconds(calls)
        rows.append(
            {"tokens": num_tokens, "given_us": given, "routed_us": routed, "router_us": routed - given}
        )
    return rows


def microseconds(calls: Sequence[Callable[[], object]], repeats: int = REPEATS) -> list[float]:
    """Median time of each call."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            while time.perf_counter() < begin + PAUSE_SECONDS:
                pass  # a sleeping thread would launch late
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            flush.fill_(1)
            start.record()
            call()
            end.record()
            end.synchronize()
            taken.append(1e3 * start.elapsed_time(end))
    return [statistics.median(taken) for taken in times]


def stage_times(kernels: Iterable[tuple[str, float, float]]) -> list[dict[str, float]]:
    """Each call's time by stage, from (name, start, end) of kernels in the order of their start.

    Raises RuntimeError unless they are the kernels of whole calls.
    """
    calls: list[dict[str, float]] = []
    last = 0.0
    expected = list(STAGES.items())
    events = list(kernels)
    for index, (name, start, end) in enumerate(events):
        stage, kernel = expected[index % len(expected)]
        if kernel not in name:
            raise RuntimeError(f"expected kernel {kernel} for stage {stage}, got {name}")
        if index % len(expected) == 0:
            calls.append({})
            last = start
        calls[-1][stage] = end - last
        last = end
    if len(events) % len(expected) != 0:
        raise RuntimeError(f"expected whole calls of {len(expected)} kernels, got {len(events)} kernels")
    return calls


def ratios(row: Row) -> dict[str, float]:
    """Our time over that of each peer in the row."""
    return {f"over_{peer}": row["us"] / row[f"{peer}_us"] for peer in PEERS if f"{peer}_us" in row}


def difference(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2<x,y> / (<x,x> + <y,y>), in float64: 0 if they are equal, NaN if either has NaN."""
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x.square().sum() + y.square().sum()))


def means(rows: Sequence[Row], key: str) -> dict[str, float]:
    """The geometric mean of a ratio in each band of tokens that has rows."""
    bands = {name: [row[key] for row in rows if row["tokens"] in band] for name, band in BANDS.items()}
    return {name: statistics.geometric_mean(ratios) for name, ratios in bands.items() if ratios}


def main() -> None:
    """Run the benchmark."""
    options = _options()
    every = MODELS if options.models else LAYERS
    layers = [layer for layer in every if options.layer in layer.name]
    if not layers:
        sys.exit(f"--layer: expected a part of {', '.join(x.name for x in every)}, got {options.layer!r}")
    if min(options.tokens) < 1:
        sys.exit(f"--tokens: expected numbers of at least 1, got {min(options.tokens)}")
    expect_gpu("benchmarks moe_layer")
    with_peer = not options.no_peer and deep_gemm_peer.available()
    if with_peer:
        compile_peers(layers, options.tokens)
    resolve_backend("hopper").warm_up()
    about = header() | {"copy_tbps": copy_bandwidth(), "repeats": REPEATS, "pause_seconds": PAUSE_SECONDS}
    if with_peer:
        about["deep_gemm"] = deep_gemm_peer.version()
    others = available_layer_peers() if options.peers else ()
    if others:
        about["peers"] = about_peers(others, layers)
    result = Result(options.json, about)
    rows = result.rows
    for layer in layers:
        weights = make_weights(layer)
        for num_tokens in options.tokens:
            result.put(measure(make_problem(layer, weights, num_tokens), with_peer, others))
        del weights
    for key in (f"over_{peer}" for peer in PEERS):
        compared = [row for row in rows if key in row]
        if compared:
            cells = ", ".join(f"{band} tokens x{mean:.3f}" for band, mean in means(compared, key).items())
            print(f"{key}, geometric mean: {cells}")
    router = [] if options.no_router else measure_router()
    for row in router:
        print(line_of(row))
    result.write(router=router)


def graph_of(call: Callable[[], object]) -> Callable[[], object]:
    """A replay of the call as a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(_: object = call) -> None:  # keeps the tensors that the graph reads
        graph.replay()

    return replay


def _stages(call: Callable[[], object], repeats: int = 10) -> dict[str, float]:
    calls = stage_times(profiled(call, repeats))
    return {stage: statistics.median(call[stage] for call in calls) for stage in STAGES}


def compile_peers(layers: Sequence[Layer], tokens: Sequence[int]) -> None:
    """Compile DeepGEMM's kernels, one per shape, with nvcc in parallel processes before anything is timed."""
    with ProcessPoolExecutor(len(layers), mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile_peers_of, layers, [tokens] * len(layers)))


def _compile_peers_of(layer: Layer, tokens: Sequence[int]) -> None:
    weights = make_weights(layer)
    for num_tokens in tokens:
        layer_peers.two_gemms(make_problem(layer, weights, num_tokens))()
    torch.cuda.synchronize()


def _options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--layer", default="", help="only layers whose name contains this")
    parser.add_argument("--models", action="store_true", help="layers of further models instead")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="default: %(default)s")
    parser.add_argument("--no-peer", action="store_true", help="skip DeepGEMM")
    parser.add_argument("--peers", action="store_true", help="measure what else is installed, too")
    parser.add_argument("--no-router", action="store_true", help="skip the router's rows (11 GB of weights)")
    return parser.parse_args()
