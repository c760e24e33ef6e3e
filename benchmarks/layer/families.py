"""The model families, built by transformers, with configurations read by the service."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertd.kernels import Routing
from expertd.service.checkpoints.config import Config
from expertd.service.checkpoints.describe import describe
from expertd.service.checkpoints.families import FAMILIES as SERVED
from expertd.service.moe.shape import LayerShape

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe", "minimax_m2")  # one for each rule
_SHIPPED = {
    "qwen3_moe": {"norm_topk_prob": True}
}  # as in the checkpoints' config.json; the class's defaults differ


@dataclass(frozen=True)
class Family:
    """A family with the sizes of one layer.

    config   transformers' configuration
    block    transformers' class of the MoE block
    shape    the layer's sizes, shared experts included, and
    routing  its router's rule, both as the service reads them from `config`
    """

    name: str
    config: Any
    block: Any
    shape: LayerShape
    routing: Routing


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence its warnings and log lines about optional packages that are not installed."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def make_family(name: str, sizes: LayerShape) -> Family:
    """The family `name` with the sizes of a layer; shared experts are the family's own."""
    with quiet_transformers(), torch.device("meta"):
        transformers = import_module("transformers")
        config = transformers.AutoConfig.for_model(name, **_SHIPPED.get(name, {}))
        experts = {"moe_intermediate_size"} & config.to_dict().keys() or {"intermediate_size"}
        config.update(dict.fromkeys(experts, sizes.intermediate_size))
        config.hidden_size, config.num_local_experts = sizes.hidden_size, sizes.num_experts
        config.num_experts_per_tok = sizes.top_k
        model = describe(Config(Path("config.json"), config.to_dict()), SERVED[name])
        first = model.layers[0]
        config.num_hidden_layers = first + 1
        block = type(transformers.AutoModel.from_config(config).layers[first].mlp)
    shape = LayerShape(
        model.hidden_size, model.intermediate_size, model.num_experts, model.top_k, model.num_shared_experts
    )
    return Family(name, config, block, shape, Routing(**model.routing))


@torch.no_grad()
def transformers_block(
    family: Family,
    implementation: str,
    gate_up: Tensor,
    down: Tensor,
    router: Tensor,
    router_bias: Tensor | None,
) -> Any:
    """The family's block in bf16 with copies of these weights.

    implementation  transformers' experts_implementation: "eager" or "grouped_mm"
    gate_up, down   bf16 [G, 2I, H] and [G, H, I]; a shared expert comes last
    """
    family.config._experts_implementation = implementation
    with quiet_transformers():
        block = family.block(family.config).to(torch.bfloat16).eval()
    routed = slice(0, family.shape.num_experts)
    values = {
        "gate.weight": router,
        "experts.gate_up_proj": gate_up[routed],
        "experts.down_proj": down[routed],
    }
    if family.shape.num_shared_experts:
        gate, up = gate_up[-1].chunk(2)
        values |= {
            f"shared_experts.{n}_proj.weight": w for n, w in (("gate", gate), ("up", up), ("down", down[-1]))
        }
    for parameter, value in values.items():
        block.get_parameter(parameter).copy_(value)
    if router_bias is not None:
        holder = block if hasattr(block, "e_score_correction_bias") else block.gate
        holder.e_score_correction_bias = router_bias.clone()  # float32, as checkpoints load it
    return block
