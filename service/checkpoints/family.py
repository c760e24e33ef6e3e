"""What is said of a family of models, and the rules that its layers and activations follow."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from expertd.activation import SILU, Activation, OtherGlu, Swiglu
from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.config import Config
from expertd.service.checkpoints.model import Names

LayerRule = Callable[[Config, int], tuple[int, ...]]
"""Config and the number of layers (those for multi-token prediction included) to the MoE layers."""


def every_layer(config: Config, end: int) -> tuple[int, ...]:
    """All of them."""
    return tuple(range(end))


def from_layer(first: int, *, key: str = "first_k_dense_replace") -> LayerRule:
    """Those from config.json's number under `key` on, `first` by default; or those that a list names.

    `mlp_layer_types` and `moe_layer_freq` may be lists with an entry for each layer, which come first, and
    `moe_layers_enum` a list of the MoE layers, or their numbers with commas between them.
    moe_layer_freq may also be a number: then only its multiples are MoE layers. A list says nothing about
    layers for multi-token prediction: they are MoE layers.
    """

    def rule(config: Config, end: int) -> tuple[int, ...]:
        num_layers = config.integer("num_hidden_layers")
        listed = _listed(config, num_layers)
        if listed is not None:
            return (*listed, *range(num_layers, end))
        begin = config.integer(key, default=first)
        every = config.integer("moe_layer_freq", default=1, minimum=1)
        return tuple(layer for layer in range(begin, end) if layer % every == 0)

    return rule


def sparse_step(config: Config, end: int) -> tuple[int, ...]:
    """Qwen's: each `decoder_sparse_step`th, except those in `mlp_only_layers`."""
    every = config.integer("decoder_sparse_step", default=1, minimum=1)
    dense = set(config.integers("mlp_only_layers"))
    return tuple(layer for layer in range(end) if (layer + 1) % every == 0 and layer not in dense)


def interleaved(config: Config, end: int) -> tuple[int, ...]:
    """Llama's: those in `moe_layers`, else each `interleave_moe_layer_step`th."""
    if config.optional("moe_layers") is not None:
        return tuple(layer for layer in config.integers("moe_layers") if 0 <= layer < end)
    every = config.integer("interleave_moe_layer_step", default=1, minimum=1)
    return tuple(range(every - 1, end, every))


def by_period(config: Config, end: int) -> tuple[int, ...]:
    """Jamba's: one in `expert_layer_period`, from `expert_layer_offset` on."""
    period = config.integer("expert_layer_period", default=2, minimum=1)
    offset = config.integer("expert_layer_offset", default=1)
    return tuple(layer for layer in range(end) if layer % period == offset)


def between(config: Config, end: int) -> tuple[int, ...]:
    """ERNIE's: from `moe_layer_start_index` to `moe_layer_end_index`, each `moe_layer_interval`th."""
    first = config.integer("moe_layer_start_index", default=1)
    last = config.integer("moe_layer_end_index", default=-1, minimum=-1)
    every = config.integer("moe_layer_interval", default=1, minimum=1)
    last = end - 1 if last == -1 else last
    return tuple(layer for layer in range(end) if first <= layer <= last and (layer + 1) % every == 0)


def _listed(config: Config, num_layers: int) -> tuple[int, ...] | None:
    """The MoE layers by a list in config.json; None: there is no list."""
    types = config.optional("mlp_layer_types")
    if types is not None:
        _check_list(config, "mlp_layer_types", types, num_layers, ("dense", "sparse"))
        return tuple(layer for layer in range(num_layers) if types[layer] == "sparse")
    frequencies = config.optional("moe_layer_freq")
    if isinstance(frequencies, list):
        _check_list(config, "moe_layer_freq", frequencies, num_layers, (0, 1))
        return tuple(layer for layer in range(num_layers) if frequencies[layer] == 1)
    named = config.optional("moe_layers_enum")
    if isinstance(named, str) and re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", named):
        return tuple(sorted({int(layer) for layer in named.split(",")} & set(range(num_layers))))
    if named is not None:
        return tuple(sorted(set(config.integers("moe_layers_enum")) & set(range(num_layers))))
    return None


def _check_list(
    config: Config, name: str, given: object, num_layers: int, allowed: tuple[object, ...]
) -> None:
    """Raise CheckpointError unless there is an allowed entry for each layer; more may follow."""
    if not isinstance(given, list) or len(given) < num_layers or any(item not in allowed for item in given):
        expected = " or ".join(map(repr, allowed))
        raise config.error(f"{name}: expected a list with {expected} for each of {num_layers} layers")


ActivationRule = Callable[[Config, int], tuple[Activation, Activation]]
"""Config and a layer's number to the activations of its routed experts, and of its shared ones."""


def silu(config: Config, layer: int) -> tuple[Activation, Activation]:
    """silu(gate) * up"""
    config.expect("hidden_act", "silu")
    return SILU, SILU


def clamped(config: Config, layer: int) -> tuple[Activation, Activation]:
    """silu(gate) * up, both clamped before"""
    config.expect("hidden_act", "silu")
    activation = Swiglu(1.0, config.positive("swiglu_limit", default=10.0))
    return activation, activation


def routed_clamped(config: Config, layer: int) -> tuple[Activation, Activation]:
    """silu(gate) * up, both clamped before in routed experts"""
    return clamped(config, layer)[0], SILU


def clamped_by_layer(config: Config, layer: int) -> tuple[Activation, Activation]:
    """silu(gate) * up, silu(gate) and up clamped in some layers"""
    config.expect("hidden_act", "silu")
    limits = config.entry("swiglu_limits", layer), config.entry("swiglu_limits_shared", layer)
    routed, shared = (OtherGlu(1.0, limit, 0.0, True) if limit else SILU for limit in limits)
    return routed, shared


def swigluoai(config: Config, layer: int) -> tuple[Activation, Activation]:
    """gate * sigmoid(alpha * gate) * (up + 1), gate and up clamped before"""
    config.expect("hidden_act", "swigluoai", "silu")  # transformers saves it as silu
    alpha = config.positive("swiglu_alpha", default=1.702)
    activation = OtherGlu(alpha, config.positive("swiglu_limit", default=7.0), 1.0)
    return activation, activation


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
class SharedExpert:
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
    shared: SharedExpert | None = None
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
    """Names under `block`; a shared expert that is outside the block is given with a leading dot."""
    return Names(
        router=f"{block}.{router}",
        experts=f"{block}.experts",
        projections=projections,
        router_bias=None if bias is None else f"{block}.{bias}",
        shared=shared[1:] if shared.startswith(".") else f"{block}.{shared}" if shared else "",
        shared_projections=shared_projections,
        shared_gate=None if shared_gate is None else f"{block}.{shared_gate}",
        stacked=tuple(f"{block}.{name}" for name in stacked),
        interleaved=interleaved,
        biases=None
        if expert_biases is None
        else (f"{block}.{expert_biases[0]}", f"{block}.{expert_biases[1]}"),
    )
