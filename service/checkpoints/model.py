"""The MoE layers that a checkpoint's config.json describes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from expertd.service.checkpoints.config import Config


@dataclass(frozen=True)
class Names:
    """A family's names for the tensors of an MoE layer; `block` follows "model.layers.L.".

    gate, up, down  the projections of an expert, under block.experts.E
    router_bias     the bias added to the scores for the choice of experts, under block; None: no bias
    shared          the shared expert, under block, if a model has one
    """

    block: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    router_bias: str | None = None
    shared: str = ""


@dataclass(frozen=True)
class MoEModel:
    """The MoE layers of one model: their numbers and sizes, the routing rule, and the tensors' names.

    routing has the keys of `RoutingSettings`. num_shared_experts counts experts of intermediate_size; the
    checkpoint stores them as one wide expert. next_token_layers are the ones in `layers` for multi-token
    prediction, which many checkpoints leave out. family is the model_type of config.json.
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
