"""Writes a checkpoint of one layer, with its experts in any encoding and any layout."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.kernels.helpers import fresh_generator
from tests.service.checkpoints.encoders import ENCODERS, Encoder

EXPERTS = 4
Tensors = dict[str, Tensor]
Change = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Layout:
    """A family whose experts lie in this way, after `block` of layer 0.

    names       of gate, up and down; of gate and up in one, and down; each of an expert E, or of all
    config      what config.json says besides the sizes
    transposed  matrices are [k, n]
    in_turns    rows are of a gate and of an up in turns
    beside      the other tensors of the block, and their sizes
    """

    block: str
    names: tuple[str, ...]
    config: Mapping[str, Any]
    transposed: bool = False
    in_turns: bool = False
    beside: Callable[[int, int], dict[str, tuple[int, ...]]] = lambda hidden, size: {}

    @property
    def is_fused(self) -> bool:
        return len(self.names) == 2


def _shared(name: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate": (size, hidden), "up": (size, hidden), "down": (hidden, size)}
    return {f"{name}.{part}_proj.weight": shape for part, shape in shapes.items()}


def _mixtral(hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {"block_sparse_moe.gate.weight": (EXPERTS, hidden)}


def _granite(hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {"block_sparse_moe.router.layer.weight": (EXPERTS, hidden)}


def _step(hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return _shared("share_expert", hidden, size) | {
        "moe.gate.weight": (EXPERTS, hidden), "moe.router_bias": (EXPERTS,)
    }  # fmt: skip


def _llama(hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return _shared("feed_forward.shared_expert", hidden, size) | {
        "feed_forward.router.weight": (EXPERTS, hidden)
    }  # fmt: skip


def _gpt_oss(hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    biases = {"gate_up_proj_bias": (EXPERTS, 2 * size), "down_proj_bias": (EXPERTS, hidden)}
    router = {"mlp.router.weight": (EXPERTS, hidden), "mlp.router.bias": (EXPERTS,)}
    return router | {f"mlp.experts.{name}": shape for name, shape in biases.items()}


_LOCAL = {"num_local_experts": EXPERTS}
_PARAMETERS = ("experts.gate_up_proj", "experts.down_proj")
LAYOUTS = {
    "a tensor each": Layout(
        "block_sparse_moe", ("experts.E.w1", "experts.E.w3", "experts.E.w2"),
        _LOCAL | {"model_type": "mixtral"}, beside=_mixtral,
    ),
    "two stacks": Layout(
        "block_sparse_moe", ("input_linear", "output_linear"), _LOCAL | {"model_type": "granitemoe"},
        beside=_granite,
    ),
    "three stacks": Layout(
        "moe", ("gate_proj", "up_proj", "down_proj"),
        {"model_type": "step3p5", "moe_num_experts": EXPERTS, "moe_layers_enum": "0"}, beside=_step,
    ),
    "transposed": Layout(
        "feed_forward", _PARAMETERS, _LOCAL | {"model_type": "llama4"}, transposed=True, beside=_llama
    ),
    "in turns": Layout(
        "mlp", _PARAMETERS, _LOCAL | {"model_type": "gpt_oss"}, transposed=True, in_turns=True,
        beside=_gpt_oss,
    ),
}  # fmt: skip


def write(
    directory: Path,
    encoding: str | Encoder,
    layout: str = "a tensor each",
    sizes: tuple[int, int] = (256, 128),
    change: Change = lambda suffix, tensor: tensor,
    quantization: Any = ...,
) -> tuple[list[Tensor], list[Tensor]]:
    """Write layer 0; returns what gate and up [2I, H], and down [H, I], mean for each expert.

    encoding      a name in ENCODERS, or what encodes a weight
    sizes         H and I
    change        what becomes of a tensor, by what follows the name of its weight
    quantization  what config.json says; ...: what exporters of this encoding say
    """
    form, (hidden, size), generator = LAYOUTS[layout], sizes, fresh_generator()
    prefix = f"model.layers.0.{form.block}"
    encode, _, said = ENCODERS[encoding] if isinstance(encoding, str) else (encoding, "", None)
    matrices = [(size, hidden), (size, hidden), (hidden, size)]
    shapes = [(2 * size, hidden), (hidden, size)] if form.is_fused else matrices
    tensors: Tensors = {}
    meant: list[list[Tensor]] = [[] for _ in shapes]
    for part, (name, shape) in enumerate(zip(form.names, shapes, strict=True)):
        encoded = []
        for _ in range(EXPERTS):
            weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
            tensors_of_one, values = encode(weight)
            encoded.append(tensors_of_one)
            meant[part].append(values)
        for suffix in encoded[0]:
            ones = [_turned(each[suffix]) if form.transposed else each[suffix] for each in encoded]
            if "E" in name:
                stack = {
                    name.replace("E", str(expert)): change(suffix, one) for expert, one in enumerate(ones)
                }
            else:
                stack = {name: change(suffix, torch.stack(ones))}
            tensors |= {f"{prefix}.{_named(one, suffix, form)}": tensor for one, tensor in stack.items()}
    for name, of in form.beside(hidden, size).items():
        tensors[f"model.layers.0.{name}"] = torch.randn(of, generator=generator) / 16
    directory.mkdir(exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    config = {
        "num_hidden_layers": 1, "hidden_size": hidden, "intermediate_size": size,
        "moe_intermediate_size": size, "share_expert_dim": size, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1, **form.config,
        "quantization_config": said if quantization is ... else quantization,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    if not form.is_fused:
        return [torch.cat(pair) for pair in zip(*meant[:2], strict=True)], meant[2]
    if form.in_turns:
        meant[0] = [torch.cat([values[0::2], values[1::2]]) for values in meant[0]]
    return meant[0], meant[1]


def _turned(tensor: Tensor) -> Tensor:
    return tensor.t() if tensor.ndim == 2 else tensor


def _named(name: str, suffix: str, form: Layout) -> str:
    """A tensor's name: of a module, or as ModelOpt names those beside a parameter."""
    if form.names != _PARAMETERS:
        return f"{name}{suffix}"
    return name if suffix == ".weight" else f"{name}_{suffix[1:]}"
