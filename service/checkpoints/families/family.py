"""What a row of the table of families says."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.families.activations import ActivationRule, silu
from expertd.service.checkpoints.families.layers import LayerRule, every_layer
from expertd.service.checkpoints.model import Names

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
W1_W3_W2 = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Router:
    """How a family chooses experts; "by default" means unless config.json says otherwise.

    scoring        of the logits
    renormalize    whether weights are divided by their sum, by default
    always         renormalize, whatever config.json says
    scale          the scaling factor by default; None: there is none
    groups         the number of expert groups, and of chosen ones, by default; None: there are none
    bias_on        what a bias is added to, as in `Routing`
    group_score    of a group: the sum of its two best experts' scores, or the best one's
    """

    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"]
    renormalize: bool = True
    always: bool = False
    scale: float | None = None
    groups: tuple[int, int] | None = None
    group_score: Literal["best_two", "best"] = "best_two"
    bias_on: Literal["choice", "logits"] = "choice"


@dataclass(frozen=True)
class Shared:
    """The size of the shared expert, which is a multiple of the routed ones'.

    count     the factor by default; None: config.json must say it
    size_key  config.json's key for the size; None: it says the factor, if `fixed` does not
    fixed     the factor is `count`, whatever config.json says
    """

    count: int | None = 1
    size_key: str | None = None
    fixed: bool = False


@dataclass(frozen=True)
class Family:
    """A row: models that follow the same rules.

    models        their names, for the documents
    router, names as in `Router` and `Names`
    shared        the shared expert; None: there is none
    activation    the experts'
    layers        the MoE layers
    refused       config.json's key for how many of the first layers cannot be served, its default, and why
    weighs_input  routing weights multiply the experts' input, not their output
    next_token    whether layers for multi-token prediction follow the others, with blocks like theirs
    intermediate  config.json's key for an expert's intermediate size
    expects       values that other keys of config.json must have if they are present
    methods       the allowed values of topk_method
    nulls         what null stands for, by key, where the family's code accepts it; elsewhere it is refused
    inside        the key, or keys, of config.json under which the language model's values are, if they are
    bias_key      the key that says whether there is a router bias; None: as `names` says
    step          sizes are multiples of it; weights are padded to whole blocks
    """

    models: str
    router: Router
    names: Names
    shared: Shared | None = None
    activation: ActivationRule = silu
    layers: LayerRule = every_layer
    refused: tuple[str, int, str] | None = None
    weighs_input: bool = False
    next_token: bool = False
    intermediate: str = "moe_intermediate_size"
    expects: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    methods: tuple[str, ...] = ("greedy", "noaux_tc")
    nulls: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    inside: tuple[str, ...] = ()
    bias_key: str | None = None
    step: int = SCALE_BLOCK


def names(
    block: str,
    projections: tuple[str, str, str] = GATE_UP_DOWN,
    *,
    router: str = "gate.weight",
    bias: str | None = None,
    shared: str = "",
    shared_projections: tuple[str, str, str] | None = None,
    shared_gate: str | None = None,
    stacked: tuple[str, ...] = ("experts.gate_up_proj", "experts.down_proj"),
    interleaved: bool = False,
    expert_biases: tuple[str, str] | None = None,
) -> Names:
    """Names under `block`; a shared expert that is beside the block is given with a leading dot."""
    beside = shared.startswith(".")
    return Names(
        router=f"{block}.{router}",
        experts=f"{block}.experts",
        projections=projections,
        router_bias=None if bias is None else f"{block}.{bias}",
        shared=shared[1:] if beside else f"{block}.{shared}" if shared else "",
        shared_projections=shared_projections,
        shared_gate=None if shared_gate is None else f"{block}.{shared_gate}",
        stacked=tuple(f"{block}.{name}" for name in stacked),
        interleaved=interleaved,
        biases=None
        if expert_biases is None
        else (f"{block}.{expert_biases[0]}", f"{block}.{expert_biases[1]}"),
    )
