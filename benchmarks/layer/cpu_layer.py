"""Times the MoE layer on a CPU against transformers' block of the same family, on the same weights."""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import Tensor

from benchmarks.layer.families import FAMILIES, Family, make_family, transformers_block
from benchmarks.lib.run import Result, Row, new_parser
from benchmarks.lib.timing import cpu_name
from expertd.kernels import decode, quantize_blocks, resolve_backend
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
IMPLEMENTATIONS = ("eager", "grouped_mm")
_WARM_UP_TURNS, _MIN_TURNS = 3, 15
_MAX_DIFF = 1e-2  # transformers rounds the logits of three families to bf16, which changes some choices


@dataclass(frozen=True)
class Method:
    """The time spent on each number of tokens, and whether every turn has the same hidden states."""

    seconds: float
    same_input: bool

    def __str__(self) -> str:
        states = (
            "the same hidden states in every turn (oneDNN has compiled for every GEMM height before)"
            if self.same_input
            else "new hidden states in every turn (oneDNN compiles for every new GEMM height)"
        )
        return (
            f"median milliseconds of calls taken in turns for at least {self.seconds} s and {_MIN_TURNS} "
            f"turns, the first {_WARM_UP_TURNS} left out; {states}; bf16 weights for theirs, FP8 for ours"
        )


def main() -> None:
    """Measure all families."""
    arguments = _arguments()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    shape = LayerShape(
        arguments.hidden_size, arguments.intermediate_size, arguments.num_experts, arguments.top_k
    )
    method = Method(arguments.seconds, arguments.same_input)
    header = _header(shape, method) | {"backend": arguments.backend}
    result = Result(arguments.json, header)
    with torch.no_grad():  # weights made in inference mode would be packed again in every call
        for name in arguments.families:
            for row in _time_family(name, shape, arguments.tokens, method, arguments.backend):
                result.put(row)


def _time_family(
    name: str, shape: LayerShape, tokens: list[int], method: Method, backend: str
) -> Iterator[Row]:
    """A row for each number of tokens, in milliseconds."""
    family = make_family(name, shape)
    generator = torch.Generator().manual_seed(0)
    layer = _layer(family, generator, backend)
    calls: dict[str, Callable[[Tensor], Tensor]] = {"ours": layer}
    for implementation in IMPLEMENTATIONS:
        calls[implementation] = _theirs(family, layer, implementation)
    _check(name, calls, shape.hidden_size, generator)
    for num_tokens in tokens:
        times = _interleaved(calls, num_tokens, shape.hidden_size, method, generator)
        ratio = times["ours"] / min(times[implementation] for implementation in IMPLEMENTATIONS)
        yield {"family": name, "tokens": num_tokens, **times, "ratio": ratio}


def _layer(family: Family, generator: torch.Generator, backend: str) -> MoELayer:
    """Our layer with random weights; the shared expert is the last group."""
    shape = family.shape
    h, i, e = shape.hidden_size, shape.intermediate_size, shape.num_experts
    gate_up, down = (
        quantize_blocks(torch.randn(size, generator=generator).mul_(size[2] ** -0.5).to(torch.bfloat16))
        for size in ((shape.num_groups, 2 * i, h), (shape.num_groups, h, i))
    )
    router = torch.randn((e, h), generator=generator).mul_(h**-0.5).to(torch.bfloat16)
    bias = torch.randn(e, generator=generator).mul_(0.1) if family.routing.scoring_func == "sigmoid" else None
    weights = ExpertWeights(router, gate_up, down, bias)
    return MoELayer(shape, weights, resolve_backend(backend), routing=family.routing)


def _theirs(family: Family, layer: MoELayer, implementation: str) -> Callable[[Tensor], Tensor]:
    """The family's block with a bf16 copy of the layer's weights, from bf16 [T, H] to [T, H]."""
    weights = layer.weights
    gate_up, down = (decode(w, torch.bfloat16) for w in (weights.gate_up, weights.down))
    block = transformers_block(family, implementation, gate_up, down, weights.router, weights.router_bias)

    def call(hidden_states: Tensor) -> Tensor:
        out: Tensor = block(hidden_states[None])
        return out[0]

    return call


def _check(
    name: str, calls: dict[str, Callable[[Tensor], Tensor]], hidden_size: int, generator: torch.Generator
) -> float:
    """The largest difference between theirs and ours on 256 tokens; exits if it is too large."""
    hidden_states = torch.randn((256, hidden_size), generator=generator).to(torch.bfloat16)
    ours = calls["ours"](hidden_states).double().flatten()
    worst = 0.0
    for implementation in IMPLEMENTATIONS:
        theirs = calls[implementation](hidden_states).double().flatten()
        squares = torch.dot(ours, ours) + torch.dot(theirs, theirs)
        worst = max(worst, 1 - 2 * (torch.dot(ours, theirs) / squares).item())
    if not worst < _MAX_DIFF:
        raise SystemExit(f"{name}: expected outputs that differ by less than {_MAX_DIFF}, got {worst:.3g}")
    return worst


def _interleaved(
    calls: dict[str, Callable[[Tensor], Tensor]],
    num_tokens: int,
    hidden_size: int,
    method: Method,
    generator: torch.Generator,
) -> dict[str, float]:
    """Median milliseconds of each call, in turns, on the same hidden states for all."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    size = (num_tokens, hidden_size)
    hidden_states = torch.randn(size, generator=generator).to(torch.bfloat16)
    deadline = time.perf_counter() + method.seconds
    turn = 0
    while turn < _MIN_TURNS or time.perf_counter() < deadline:
        for name, call in calls.items():
            start = time.perf_counter()
            call(hidden_states)
            if turn >= _WARM_UP_TURNS:
                taken[name].append(time.perf_counter() - start)
        if not method.same_input:
            hidden_states = torch.randn(size, generator=generator).to(torch.bfloat16)
        turn += 1
    return {name: 1e3 * statistics.median(times) for name, times in taken.items()}


def _header(shape: LayerShape, method: Method) -> dict[str, str]:
    transformers = import_module("transformers").__version__
    return {
        "machine": f"{cpu_name()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads",
        "versions": f"torch {torch.__version__}, transformers {transformers}, "
        f"Python {platform.python_version()}",
        "layer": f"hidden {shape.hidden_size}, intermediate {shape.intermediate_size}, "
        f"{shape.num_experts} experts, top {shape.top_k}, bf16 hidden states, routed by the router",
        "method": str(method),
    }


def _arguments() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--num-experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--backend", default="cpu", choices=("cpu", "reference"))
    parser.add_argument("--threads", type=int, help="torch's threads (default: torch's choice)")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each number of tokens")
    parser.add_argument("--same-input", action="store_true", help="the same hidden states in every turn")
    return parser.parse_args()
