"""The error of every rounding in a layer, against the layer in float64, and that of transformers' paths."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.layer.families import FAMILIES, Family, make_family, quiet_transformers, transformers_block
from benchmarks.lib.markdown import table
from benchmarks.lib.run import Result, Row, new_parser
from benchmarks.lib.timing import cpu_name
from expertd.kernels import (
    Backend,
    Quantized,
    dequantize_blocks,
    dequantize_rows,
    quantize_blocks,
    quantize_rows,
    resolve_backend,
)
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights

Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Rounding:
    """The roundings in a layer: each is a function of a float64 tensor, possibly the identity."""

    hidden_states: Round
    gate_up: Round
    activated: Round
    rows: Round


def _exact(x: Tensor) -> Tensor:
    return x


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def _fp8(x: Tensor) -> Tensor:
    return dequantize_rows(*quantize_rows(x.float())).double()


EXACT = Rounding(_exact, _exact, _exact, _exact)
STEPS = {
    "hidden states to FP8": Rounding(_fp8, _exact, _exact, _exact),
    "GEMM 1 to bf16": Rounding(_exact, _bf16, _exact, _exact),
    "activated to FP8": Rounding(_exact, _exact, _fp8, _exact),
    "GEMM 2 to bf16": Rounding(_exact, _exact, _exact, _bf16),
    "these four together": Rounding(_fp8, _bf16, _fp8, _bf16),
}


@dataclass(frozen=True)
class Case:
    """A layer of a family: bf16 weights [G, 2I, H] and [G, H, I], tokens, and their routing."""

    family: Family
    gate_up: Tensor
    down: Tensor
    router: Tensor
    bias: Tensor | None
    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


def main() -> None:
    """Print a column for each family: the root mean square error over that of the output, in percent."""
    arguments = _arguments()
    shape = LayerShape(arguments.hidden_size, arguments.intermediate_size, arguments.num_experts, 4)
    header = {
        "cpu": cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "torch": torch.__version__,
        "transformers": import_module("transformers").__version__,
        "layer": f"hidden {shape.hidden_size}, intermediate {shape.intermediate_size}, {shape.num_experts} "
        f"experts, top {shape.top_k}; {arguments.tokens} tokens",
        "data": "weights normal with variance 1 / fan-in, tokens normal, both bf16; seed 0",
        "figures": "per cent, root mean square of the difference over that of the float64 output",
    }
    result = Result(arguments.json, header)
    for name in FAMILIES:
        case = make_case(make_family(name, shape), arguments.tokens)
        result.put({"family": name, "errors": measure(case)})
    print(table(("", *FAMILIES), by_step(result.rows)))


def by_step(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A line for each step of the layer, with a cell for each family."""
    return [(step, *(f"{row['errors'][step]:.2f}" for row in rows)) for step in rows[0]["errors"]]


def make_case(family: Family, num_tokens: int) -> Case:
    """Random weights, tokens and their routing, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).mul_(size[-1] ** -0.5).to(torch.bfloat16)

    shape = family.shape
    h, i, e = shape.hidden_size, shape.intermediate_size, shape.num_experts
    gate_up, down, router = normal(shape.num_groups, 2 * i, h), normal(shape.num_groups, h, i), normal(e, h)
    bias = torch.randn(e, generator=generator).mul_(0.1) if family.routing.scoring_func == "sigmoid" else None
    hidden_states = torch.randn(num_tokens, h, generator=generator).to(torch.bfloat16)
    weights = ExpertWeights(router, quantize_blocks(gate_up), quantize_blocks(down), bias)
    layer = MoELayer(shape, weights, resolve_backend("reference"), routing=family.routing)
    topk_ids, topk_weights = layer.route(hidden_states)
    return Case(family, gate_up, down, router, bias, hidden_states, topk_ids, topk_weights)


@torch.no_grad()
def measure(case: Case) -> dict[str, float]:
    """The error in percent, by rounding step or by implementation."""
    plain = _layer64(case, case.gate_up, case.down, EXACT)
    quantized = quantize_blocks(case.gate_up), quantize_blocks(case.down)
    gate_up, down = (dequantize_blocks(*weights) for weights in quantized)
    fp8 = _layer64(case, gate_up, down, EXACT)
    figures = {"weights to FP8": _error(fp8, plain)}
    for name, rounding in STEPS.items():
        figures[name] = _error(_layer64(case, gate_up, down, rounding), fp8)
    figures["all of it, against bf16 weights"] = _error(_layer64(case, gate_up, down, STEPS[name]), plain)
    for name, out in _ours(case, *quantized).items():
        figures[name] = _error(out, fp8)
    figures["transformers, FP8 weights, its arithmetic"] = _error(_transformers_fp8(case, *quantized), fp8)
    figures["transformers, bf16 weights, against these"] = _error(_transformers_bf16(case), plain)
    return figures


def _error(out: Tensor, expected: Tensor) -> float:
    return 100 * float((out.double() - expected).norm() / expected.norm())


def _layer64(case: Case, gate_up: Tensor, down: Tensor, rounding: Rounding) -> Tensor:
    """The layer in float64, except for the steps in `rounding`."""
    x = rounding.hidden_states(case.hidden_states.double())
    out = torch.zeros_like(x)
    for group in range(case.family.shape.num_groups):
        if group < case.family.shape.num_experts:
            tokens, slots = (case.topk_ids == group).nonzero(as_tuple=True)
            weights = case.topk_weights[tokens, slots].double()
        else:
            tokens, weights = torch.arange(len(x)), torch.ones(len(x), dtype=torch.float64)
        if not len(tokens):
            continue
        gate, up = rounding.gate_up(x[tokens] @ gate_up[group].double().t()).chunk(2, dim=1)
        activated = rounding.activated(torch.nn.functional.silu(gate) * up)
        rows = rounding.rows(activated @ down[group].double().t())
        out.index_add_(0, tokens, rows * weights[:, None])
    return out


def _ours(case: Case, gate_up: Quantized, down: Quantized) -> dict[str, Tensor]:
    """Our layer as a CPU computes it, with Hopper's steps in PyTorch, and on Hopper if there is one."""

    class Composed(type(resolve_backend("reference"))):  # type: ignore[misc]
        ffn = Backend.ffn

    def run(backend: Backend, device: str) -> Tensor:
        first, second = (Quantized(w.data.to(device), w.scales.to(device)) for w in (gate_up, down))
        bias = None if case.bias is None else case.bias.to(device)
        weights = ExpertWeights(case.router.to(device), first, second, bias)
        layer = MoELayer(case.family.shape, weights, backend, routing=case.family.routing)
        routing = case.topk_ids.to(device), case.topk_weights.to(device)
        return layer(case.hidden_states.to(device), *routing).cpu()

    outputs = {
        "expertd on a CPU": run(resolve_backend("cpu"), "cpu"),
        "expertd on a CPU, in PyTorch": run(resolve_backend("reference"), "cpu"),
        "expertd, Hopper's steps in PyTorch": run(Composed(), "cpu"),
    }
    if torch.cuda.is_available():
        outputs["expertd on Hopper"] = run(resolve_backend("hopper"), "cuda")
    return outputs


def _transformers_bf16(case: Case) -> Tensor:
    """The family's block in bf16, given the routing."""
    with quiet_transformers():
        block = transformers_block(case.family, "eager", case.gate_up, case.down, case.router, case.bias)
        x = case.hidden_states
        out: Tensor = block.experts(x, case.topk_ids.long(), case.topk_weights.to(torch.bfloat16))
        if case.family.shape.num_shared_experts:
            out = out + block.shared_experts(x)
        return out


def _transformers_fp8(case: Case, gate_up: Quantized, down: Quantized) -> Tensor:
    """transformers' FP8Experts without its kernel, which needs a GPU and a download.

    The kernel's own step (quantize rows to FP8 by 128 columns, multiply) is computed exactly here, and
    rounded to bf16.
    """
    with quiet_transformers():
        from transformers.integrations.finegrained_fp8 import FP8Experts

        class Experts(FP8Experts):  # type: ignore[misc]
            def linear(
                self, x: Tensor, weight: Tensor, scale: Tensor, activation_scale: Any = None
            ) -> Tensor:
                return (_fp8(x.double()) @ dequantize_blocks(weight, scale).double().t()).to(torch.bfloat16)

        block = transformers_block(case.family, "eager", case.gate_up, case.down, case.router, case.bias)
        experts = Experts(block.experts.config, (128, 128))
    groups = slice(0, case.family.shape.num_experts)
    for name, weights in (("gate_up_proj", gate_up), ("down_proj", down)):
        setattr(experts, name, torch.nn.Parameter(weights.data[groups], requires_grad=False))
        setattr(experts, f"{name}_scale_inv", torch.nn.Parameter(weights.scales[groups], requires_grad=False))
    x = case.hidden_states
    out: Tensor = experts(x, case.topk_ids.long(), case.topk_weights)
    for group in range(case.family.shape.num_experts, case.family.shape.num_groups):
        gate, up = experts.linear(x, gate_up.data[group], gate_up.scales[group]).chunk(2, dim=1)
        activated = torch.nn.functional.silu(gate) * up
        out = out + experts.linear(activated, down.data[group], down.scales[group])
    return out


def _arguments() -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--intermediate-size", type=int, default=512)
    parser.add_argument("--num-experts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    return parser.parse_args()
