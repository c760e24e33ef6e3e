"""What a checkpoint's config.json says of its MoE layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from expertd.service.checkpoints.config import Config


@dataclass(frozen=True)
class Names:
    """How a family calls the tensors of an MoE layer; `block` is what follows model.layers.L.

    gate, up, down  the projections of an expert, under block.experts.E
    router_bias     the tensor that is added to the scores that choose, under block; None: there is none
    shared          the shared expert, under block, where a model has one
    """

    block: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router_bias: str | None = None
    shared: str = ""


@dataclass(frozen=True)
class MoEModel:
    """The MoE layers of one model: which there are, their sizes, the router's rule, and the tensors' names.

    routing has the keys of `RoutingSettings`. num_shared_experts counts experts of
    intermediate_size, which the checkpoint keeps as one expert of their sizes together. next_token_layers
    are those of `layers` that predict further tokens: many checkpoints leave them out. family is the
    model_type of config.json.
    """

    layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    routing: dict[str, Any]
    names: Names
    num_shared_experts: int = 0
    next_token_layers: range = range(0)
    family: str = ""


Family = Callable[[Config], MoEModel]
