"""The model families: their MoE blocks in transformers, and our rules for their routers."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from expertd.kernels import Routing
from expertd.service.moe.shape import LayerShape


@dataclass(frozen=True)
class Family:
    """A family's block in transformers, the names of its sizes there, and our rule for its router."""

    module: str
    config: str
    block: str
    num_experts: str
    intermediate_size: str
    routing: Routing
    settings: dict[str, Any] = field(default_factory=dict)
    num_shared_experts: int = 0


FAMILIES = {
    "qwen3_moe": Family(
        "qwen3_moe", "Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock", "num_experts", "moe_intermediate_size",
        Routing("softmax"), {"norm_topk_prob": True},
    ),
    "mixtral": Family(
        "mixtral", "MixtralConfig", "MixtralSparseMoeBlock", "num_local_experts", "intermediate_size",
        Routing("softmax"),
    ),
    "deepseek_v3": Family(
        "deepseek_v3", "DeepseekV3Config", "DeepseekV3MoE", "n_routed_experts", "moe_intermediate_size",
        Routing("sigmoid", True, 2.5, 8, 4),
        {"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "n_shared_experts": 1}, 1,
    ),
    "glm4_moe": Family(
        "glm4_moe", "Glm4MoeConfig", "Glm4MoeMoE", "n_routed_experts", "moe_intermediate_size",
        Routing("sigmoid"), {"n_shared_experts": 1}, 1,
    ),
    "minimax_m2": Family(
        "minimax_m2", "MiniMaxM2Config", "MiniMaxM2SparseMoeBlock", "num_local_experts", "intermediate_size",
        Routing("sigmoid"),
    ),
}  # fmt: skip


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without its warnings and log lines on whatever else is not installed."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


@torch.no_grad()
def transformers_block(
    family: Family,
    shape: LayerShape,
    implementation: str,
    gate_up: Tensor,
    down: Tensor,
    router: Tensor,
    router_bias: Tensor | None,
) -> Any:
    """The family's block in bf16 with copies of these weights.

    implementation  what transformers calls experts_implementation: "eager", "grouped_mm"
    gate_up, down   bf16 [G, 2I, H] and [G, H, I], the shared expert's last where there is one
    """
    with quiet_transformers():
        config_class = getattr(import_module("transformers"), family.config)
        modeling = import_module(f"transformers.models.{family.module}.modeling_{family.module}")
    sizes = {
        "hidden_size": shape.hidden_size,
        family.intermediate_size: shape.intermediate_size,
        family.num_experts: shape.num_experts,
        "num_experts_per_tok": shape.top_k,
    }
    config = config_class(**sizes, **family.settings)
    config._experts_implementation = implementation
    block = getattr(modeling, family.block)(config).to(torch.bfloat16).eval()
    routed = slice(0, shape.num_experts)
    values = {
        "gate.weight": router,
        "experts.gate_up_proj": gate_up[routed],
        "experts.down_proj": down[routed],
    }
    if shape.num_shared_experts:
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
