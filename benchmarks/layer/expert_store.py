"""Expert store benchmark: `python -m benchmarks expert_store [--backend NAME] [--json FILE]`.

Some of the layers of a stand-in for Qwen3-30B-A3B, with their experts in the host's memory and their share of
a budget for 48 layers. In rows of decode, each token's experts are drawn by Zipf's law, in an order of each
layer, and steps go through all layers; `us` is the time of a layer that is called. `over_bound` is that over
a bound: the time of a layer whose experts are all on the GPU, called in the same way (`resident_us`), plus
that of copying the missed bytes (`copies_us`) at the rate that is measured first. `over_graph_bound` has the
resident layers' time in a CUDA graph instead. The row of hits repeats one step, and that of prefill has 4,096
tokens that are divided evenly. Outputs are compared bit by bit.

`step_us` is the time of a step as a server runs it, one request whose rows lie on the GPU, up to 256 tokens
in a CUDA graph; `resident_step_us` that with all experts on the GPU. `over_step_bound` is the first over the
second plus that of the bytes which these steps missed. In the row of hits, `slots_graph_us` is the time of
the layers that find all experts in slots, in a CUDA graph as the resident ones of `graph_us`.

With `--weights`, experts have four bits, which the backend hopper packs.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from benchmarks.gemm.grouped_gemm import FOUR_BITS
from benchmarks.layer.moe_layer import graph_of
from benchmarks.layer.problem import LAYERS, make_weights
from benchmarks.lib.run import Result, Row, new_parser
from benchmarks.lib.timing import expect_gpu, header
from benchmarks.serving.steps import place
from expertd.backends import BACKENDS
from expertd.kernels import resolve_backend
from expertd.limits import MAX_GROUPS
from expertd.service.device import Device, device_of
from expertd.service.memory import Span
from expertd.service.moe.expert_budget import slots_within
from expertd.service.moe.expert_store import ExpertStore, StoreMemory
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.needs import stored_shape
from expertd.service.moe.request import LayerRequest
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.step.staging import Staging
from expertd.service.moe.weights import MATRICES, ExpertWeights, random_weights
from expertd.weight_format import FP8_BLOCKS, WeightFormat

MODEL = next(layer for layer in LAYERS if layer.name == "qwen3-30b-a3b")
MODEL_LAYERS, GIB = 48, 1 << 30
SHAPE = LayerShape(MODEL.hidden_size, MODEL.intermediate_size, MODEL.num_experts, MODEL.top_k)
LAYOUTS = {"fp8": FP8_BLOCKS, **FOUR_BITS}
TOKENS, HIT_TOKENS = (1, 4, 16, 64), (1, 4)
PREFILL_TOKENS = 4096
_WARM_UP = 40


@dataclass
class Case:
    """Layers with stores, and the same with all experts on the GPU."""

    memory: StoreMemory
    stores: list[ExpertStore]
    stored: list[MoELayer]
    resident: list[MoELayer]
    runners: tuple[list[LayerRunner], list[LayerRunner]]
    """Of both."""

    def counts(self) -> tuple[int, int, int]:
        """Hits, misses and missed bytes so far."""
        each = self.memory.counts.values()
        hits, misses = sum(one.hits for one in each), sum(one.misses for one in each)
        return hits, misses, sum(one.num_bytes for one in each)


Routing = tuple[Tensor, Tensor]
Call = Callable[[MoELayer, Tensor, Tensor, Tensor], object]


def as_called(layer: MoELayer, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
    """A layer that has all experts."""
    layer(hidden_states, topk_ids, topk_weights)


def in_slots(
    offsets: Tensor, layer: MoELayer, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> None:
    """A layer with a store that has all experts of the step, and is not asked whether it has."""
    out = torch.empty(hidden_states.shape, device="cuda")
    layer.in_slots(hidden_states, topk_ids, topk_weights, None, out, offsets)


def weights_of(shape: LayerShape, seed: int) -> ExpertWeights:
    """The weights of a layer."""
    if shape.weight_layout.format is not WeightFormat.FP8:
        return random_weights(shape, seed, "cuda")
    made = make_weights(MODEL)
    router = torch.zeros(SHAPE.num_experts, SHAPE.hidden_size, device="cuda")
    return ExpertWeights(router, made.gate_up, made.down)


def make_case(shape: LayerShape, num_layers: int, num_slots: int, backend: str) -> Case:
    """The layers; all weights differ."""
    device = device_of("cuda")
    case, chosen = Case(StoreMemory(device), [], [], [], ([], [])), resolve_backend(backend)
    for number in range(num_layers):
        weights = weights_of(shape, number)
        case.resident.append(MoELayer(shape, weights, chosen))
        for name in MATRICES:
            case.resident[-1].pack(name)
        store = ExpertStore(case.memory, str(number), shape, weights, num_slots, chosen)
        case.stores.append(store)
        case.stored.append(MoELayer(shape, store.on_device(weights), chosen, store=store))
    case.runners = runners_of(case.stored, device), runners_of(case.resident, device)
    return case


def runners_of(layers: Sequence[MoELayer], device: Device) -> list[LayerRunner]:
    """As a server has them: their graphs share memory."""
    staging, pool = Staging(device), device.new_graph_pool()
    runners = [LayerRunner(layer, device, staging=staging) for layer in layers]
    for runner in runners:
        runner.capture(pool)
    return runners


def zipf_routings(num_layers: int, num_tokens: int, exponent: float, steps: int) -> list[list[Routing]]:
    """For each step a layer's topk_ids and topk_weights, each drawn without the experts drawn before."""
    ranks = torch.arange(1, SHAPE.num_experts + 1, device="cuda", dtype=torch.float32)
    orders = [torch.randperm(SHAPE.num_experts, device="cuda") for _ in range(num_layers)]

    def draw(order: Tensor) -> Routing:
        uniform = torch.rand(num_tokens, SHAPE.num_experts, device="cuda").clamp(min=1e-9)
        drawn = (-exponent * ranks.log() - (-uniform.log()).log()).topk(SHAPE.top_k).indices
        return order[drawn].to(torch.int32), torch.rand(num_tokens, SHAPE.top_k, device="cuda")

    return [[draw(order) for order in orders] for _ in range(steps)]


def copy_rate(case: Case, repeats: int = 5) -> float:
    """Bytes per second from the host's memory to slots, an expert at a time: the best of some turns."""
    store, device = case.stores[0], case.memory.device
    experts = list(range(store.num_slots))
    best = 0.0
    for _ in range(repeats):
        copies = store.host.copies(experts[::-1], store.room, experts)  # none continues another
        device.synchronize()
        began = time.perf_counter()
        device.copy(copies, case.memory.copies)
        device.synchronize()
        best = max(best, len(experts) * store.host.expert_bytes / (time.perf_counter() - began))
    return best


def run_steps(layers: Sequence[MoELayer], hidden_states: Tensor, steps: Sequence[Sequence[Routing]]) -> float:
    """Seconds of these steps, each through all layers."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for routings in steps:
        for layer, routing in zip(layers, routings, strict=True):
            layer(hidden_states, *routing)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def requests_of(hidden_states: Tensor, steps: Sequence[Sequence[Routing]]) -> list[list[LayerRequest]]:
    """A request for each step and layer, with its rows, routing and output on the GPU."""
    rows = place(hidden_states, "device")
    out = place(torch.empty_like(hidden_states), "device")
    assert isinstance(out, Span)

    def request(ids: Tensor, weights: Tensor) -> LayerRequest:
        routing = place(ids, "device"), "INT32", place(weights, "device")
        return LayerRequest(len(hidden_states), rows, "BF16", *routing, "BF16", out)

    return [[request(*routing) for routing in routings] for routings in steps]


def output_of(runner: LayerRunner, request: LayerRequest) -> Tensor:
    """A copy of what a step writes to the GPU's memory."""
    (output,) = runner.run([request]).outputs
    assert isinstance(output, Span)
    assert isinstance(output.owner, Tensor)
    return output.owner.clone()


def runner_seconds(runners: Sequence[LayerRunner], steps: Sequence[Sequence[LayerRequest]]) -> float:
    """Seconds of these steps, each through all layers, one request after another."""
    began = time.perf_counter()
    for requests in steps:
        for runner, request in zip(runners, requests, strict=True):
            runner.run([request])
    return time.perf_counter() - began


def graph_seconds(
    layers: Sequence[MoELayer], call: Call, hidden_states: Tensor, steps: Sequence[Sequence[Routing]]
) -> float:
    """Seconds of these steps, all layers of a step in a graph."""
    given = [(ids.clone(), weights.clone()) for ids, weights in steps[0]]

    def step() -> None:
        for layer, routing in zip(layers, given, strict=True):
            call(layer, hidden_states, *routing)

    replay: Callable[[], object] = graph_of(step)
    seconds = 0.0
    for routings in steps:
        for (ids, _), (new_ids, _) in zip(given, routings, strict=True):
            ids.copy_(new_ids)
        torch.cuda.synchronize()
        began = time.perf_counter()
        replay()
        torch.cuda.synchronize()
        seconds += time.perf_counter() - began
    return seconds


def measure(case: Case, name: str, steps: Sequence[Sequence[Routing]], warm_up: int, rate: float) -> Row:
    """A row; the first `warm_up` steps are left out."""
    num_tokens, num_layers = len(steps[0][0][0]), len(case.stored)
    hidden_states = torch.randn(num_tokens, SHAPE.hidden_size, device="cuda").to(torch.bfloat16)
    run_steps(case.stored, hidden_states, steps[:warm_up])
    run_steps(case.resident, hidden_states, steps[:warm_up])
    for stored, whole, routing in zip(case.stored, case.resident, steps[0], strict=True):
        same = torch.equal(stored(hidden_states, *routing), whole(hidden_states, *routing))
        if not same:
            raise SystemExit(
                f"{name}, {num_tokens} tokens: expected the bits of a resident layer, got others"
            )
    measured, before = steps[warm_up:], case.counts()
    seconds = run_steps(case.stored, hidden_states, measured)
    hits, misses, missed = (now - then for now, then in zip(case.counts(), before, strict=True))
    calls = len(measured) * num_layers
    resident = run_steps(case.resident, hidden_states, measured) / calls
    graph = graph_seconds(case.resident, as_called, hidden_states, measured) / calls
    copies, us = missed / rate / calls, 1e6 * seconds / calls
    requests = requests_of(hidden_states, measured)
    for stored_runner, runner, request in zip(*case.runners, requests[0], strict=True):
        if not torch.equal(output_of(stored_runner, request), output_of(runner, request)):
            raise SystemExit(f"{name}, {num_tokens} tokens: expected the bits of a resident step, got others")
    before = case.counts()
    step = runner_seconds(case.runners[0], requests) / calls
    missed_by_steps = (case.counts()[2] - before[2]) / calls
    resident_step = runner_seconds(case.runners[1], requests) / calls
    row: Row = {
        "case": name,
        "tokens": num_tokens,
        "hit_rate": hits / (hits + misses),
        "missed_mb": missed / calls / 1e6,
        "us": us,
        "resident_us": 1e6 * resident,
        "graph_us": 1e6 * graph,
        "copies_us": 1e6 * copies,
        "over_bound": us / (1e6 * (resident + copies)),
        "over_graph_bound": us / (1e6 * (graph + copies)),
        "step_us": 1e6 * step,
        "step_missed_mb": missed_by_steps / 1e6,
        "resident_step_us": 1e6 * resident_step,
        "over_step_bound": step / (resident_step + missed_by_steps / rate),
    }
    if name == "hits":
        call = partial(in_slots, torch.empty(MAX_GROUPS + 1, dtype=torch.int32, pin_memory=True))
        seconds = graph_seconds(case.stored, call, hidden_states, measured)
        row["slots_graph_us"] = 1e6 * seconds / calls
    return row


def main() -> None:
    """Run the benchmark."""
    options = _options()
    expect_gpu("benchmarks expert_store")
    shape = replace(SHAPE, weight_layout=LAYOUTS[options.weights])
    stored = stored_shape(shape, BACKENDS[options.backend])
    shapes = {str(number): stored for number in range(options.layers)}
    num_slots = slots_within(int(options.budget * GIB * options.layers / MODEL_LAYERS), shapes)["0"]
    case = make_case(shape, options.layers, num_slots, options.backend)
    rate = copy_rate(case)
    about = header() | {
        "backend": options.backend,
        "weights": options.weights,
        "layers": options.layers,
        "slots": num_slots,
        "zipf": options.zipf,
        "copy_gbps": rate / 1e9,
    }
    result = Result(options.json, about)
    with torch.inference_mode():
        for num_tokens in options.tokens:
            steps = zipf_routings(options.layers, num_tokens, options.zipf, _WARM_UP + options.steps)
            result.put(measure(case, "decode", steps, _WARM_UP, rate))
        for num_tokens in HIT_TOKENS:
            same = zipf_routings(options.layers, num_tokens, options.zipf, 1) * (2 + options.steps)
            result.put(measure(case, "hits", same, 2, rate))
        steps = zipf_routings(options.layers, PREFILL_TOKENS, 0.0, 4)
        result.put(measure(case, "prefill", steps, 1, rate))


def _options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--backend", default="hopper", help="hopper or triton")
    parser.add_argument("--budget", type=float, default=10, help="GiB for 48 layers (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, help="layers to measure (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="of each row of decode (default: %(default)s)")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="default: %(default)s")
    parser.add_argument("--weights", choices=LAYOUTS, default="fp8", help="default: %(default)s")
    parser.add_argument("--zipf", type=float, default=1.0, help="the exponent (default: %(default)s)")
    return parser.parse_args()
