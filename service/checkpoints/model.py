"""The MoE layers that a checkpoint's config.json describes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from expertd.activation import ExpertRule
from expertd.service.checkpoints.quantization import Quantization

PREFIXES = (
    "model.layers.",
    "model.language_model.layers.",
    "language_model.model.layers.",
    "model.language_model.model.layers.",
    "thinker.model.layers.",
    "layers.",
)
"""What may stand before a layer's number in the names of its tensors; it differs between checkpoints."""


@dataclass(frozen=True)
class Names:
    """A family's names for the tensors of an MoE layer, after the layer's number and a dot.

    router        the router's weight
    experts       the routed experts: their projections are under experts.E
    projections   of an expert: gate, up, down
    router_bias   the bias added to the scores for the choice of experts; None: no bias
    shared        the shared expert, if a model has one
    shared_projections  of the shared expert, gate, up, down; None: named like those of the routed ones
    shared_gate   the weight of the shared expert's gate; None: it has none
    stacked       all experts' projections in one tensor each: (gate and up, down), or gate, up, down
    interleaved   in the first of these, rows are of a gate and of an up in turns
    biases        all experts' biases: (gate and up, down), in the same order; None: there are none
    """

    router: str
    experts: str
    projections: tuple[str, str, str]
    router_bias: str | None
    shared: str
    shared_projections: tuple[str, str, str] | None
    shared_gate: str | None
    stacked: tuple[str, ...]
    interleaved: bool = False
    biases: tuple[str, str] | None = None


@dataclass(frozen=True)
class MoEModel:
    """The MoE layers of one model: their numbers and sizes, the routing rule, and the tensors' names.

    routing has the keys of `RoutingSettings`. num_shared_experts counts experts of intermediate_size; the
    checkpoint stores them as one wide expert. next_token_layers are the ones in `layers` for multi-token
    prediction, which many checkpoints leave out. family is the model_type of config.json. rules has those of
    the layers whose experts do not follow the common one. refused says of layers that are MoE layers, but
    not in `layers`, why they cannot be served. quantization is what is said of their weights.
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
    rules: Mapping[int, ExpertRule] = field(default_factory=lambda: MappingProxyType({}))
    refused: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    quantization: Quantization = field(default_factory=Quantization, compare=False)
