"""Reads config.json: the MoE layers of a model, as the row of its family says."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from expertd.activation import COMMON, ExpertRule
from expertd.limits import MAX_EXPERTS
from expertd.service.checkpoints.config import CheckpointError, Config
from expertd.service.checkpoints.families import FAMILIES, REFUSED
from expertd.service.checkpoints.family import Family
from expertd.service.checkpoints.files import hint_of
from expertd.service.checkpoints.model import MoEModel, Names
from expertd.service.checkpoints.quantization import read_quantization
from expertd.service.util.sentences import shown

# The spellings of keys, which differ between families for one and the same value.
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
_SHARED = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_SCALE = (
    "routed_scaling_factor",
    "moe_routed_scaling_factor",
    "moe_router_scaling_factor",
    "router_scaling_factor",
    "route_scale",
)
_RENORMALIZE = ("norm_topk_prob", "moe_renormalize", "route_norm", "norm_expert_weight")
_GROUPS = ("n_group", "num_expert_group")
_TOP_GROUPS = ("topk_group",)
_SCORING = ("scoring_func", "score_function", "score_func", "moe_router_activation_func")
_NEXT_TOKEN = ("num_nextn_predict_layers",)

_RULE = (*_EXPERTS, *_TOP_K, *_SHARED, *_SCALE, *_RENORMALIZE, *_GROUPS, *_TOP_GROUPS, *_SCORING)
"""Keys that decide what a layer computes: null is refused unless the family gives it a meaning."""
_HASHED = "hash_moe"
_OF_EXPERTS = re.compile("expert|moe")
_TEXT = "_text"  # what follows a model_type if config.json is only that of the language model


def describe(config: Config, family: Family) -> MoEModel:
    """The model whose language model has this configuration. Raises CheckpointError."""
    config = config.with_nulls(family.nulls)
    _check(config, family)
    num_layers = config.integer("num_hidden_layers")
    end = num_layers + (config.integer(*_NEXT_TOKEN, default=0) if family.next_token else 0)
    intermediate = config.size(family.intermediate, step=family.step)
    layers, refused = family.layers(config, end), _refused(config, family)
    return MoEModel(
        layers=tuple(layer for layer in layers if layer not in refused),
        hidden_size=config.size("hidden_size", step=family.step),
        intermediate_size=intermediate,
        num_experts=config.integer(*_EXPERTS, minimum=1, maximum=MAX_EXPERTS),
        top_k=config.integer(*_TOP_K, minimum=1),
        num_shared_experts=_shared(config, family, intermediate),
        routing=_routing(config, family),
        next_token_layers=range(num_layers, end),
        names=_names(config, family),
        rules=_rules(config, family, layers),
        refused=refused,
    )


def _check(config: Config, family: Family) -> None:
    """Raise CheckpointError if config.json contradicts the row."""
    for key, value in family.expects.items():
        config.expect(key, value)
    config.expect("topk_method", *family.methods)
    for key in _SCORING:
        config.expect(key, family.router.scoring)
    for key in _RULE:
        if config.is_null(key):
            raise config.error(f"{key}: expected a value, got null")


def _refused(config: Config, family: Family) -> dict[int, str]:
    """The MoE layers that cannot be served, and why."""
    if family.refused is None:
        return {}
    key, default, why = family.refused
    types = config.optional("mlp_layer_types")
    if isinstance(types, list):
        return {layer: why for layer, name in enumerate(types) if name == _HASHED}
    return dict.fromkeys(range(config.integer(key, default=default)), why)


def _rules(config: Config, family: Family, layers: tuple[int, ...]) -> dict[int, ExpertRule]:
    """The rules of the layers whose experts do not follow the common one."""
    every = {layer: ExpertRule(*family.activation(config, layer), family.weighs_input) for layer in layers}
    return {layer: rule for layer, rule in every.items() if rule != COMMON}


def _names(config: Config, family: Family) -> Names:
    """The row's names, without those of tensors that config.json turns off."""
    if family.bias_key is None or config.boolean(family.bias_key, default=True):
        return family.names
    return replace(family.names, router_bias=None)


def _routing(config: Config, family: Family) -> dict[str, Any]:
    router = family.router
    if config.optional("topk_method") == "group_limited_greedy":
        router = replace(router, groups=(1, 1), group_score="best")
    renormalize = router.renormalize
    if not router.always:
        renormalize = config.boolean(*_RENORMALIZE, default=renormalize)
    for key in _RENORMALIZE if router.always else ():
        config.expect(key, router.renormalize)
    for key in _SCALE if router.scale is None else ():
        config.expect(key, 1)
    for key in (*_GROUPS, *_TOP_GROUPS) if router.groups is None else ():
        config.expect(key, 1, 0)
    routing: dict[str, Any] = {"scoring_func": router.scoring, "renormalize": renormalize}
    if router.scale is not None:
        routing["routed_scaling_factor"] = config.number(*_SCALE, default=router.scale)
    if router.groups is not None:
        groups, chosen = router.groups
        routing["num_expert_groups"] = config.integer(*_GROUPS, default=groups, minimum=1)
        routing["topk_group"] = config.integer(*_TOP_GROUPS, default=chosen, minimum=1)
    if router.group_score != "best_two":
        routing["group_score"] = router.group_score
    if router.bias_on != "choice":
        routing["bias_on"] = router.bias_on
    return routing


def _shared(config: Config, family: Family, intermediate: int) -> int:
    """The shared expert's size, in sizes of a routed one."""
    shared = family.shared
    if shared is None:
        for key in _SHARED:
            if config.optional(key) not in (None, 0):
                raise config.error(f"{key}: expected none, got {shown(config.optional(key))}")
        return 0
    if shared.fixed:
        return shared.count or 0
    if shared.size_key is None:
        return config.integer(*_SHARED, default=shared.count)
    size = config.integer(shared.size_key)
    if size % intermediate:
        expected = f"a multiple of {family.intermediate} ({intermediate})"
        raise config.error(f"{shared.size_key}: expected {expected}, got {size}")
    return size // intermediate


def read_model(directory: Path) -> MoEModel:
    """The model described by config.json in `directory`. Raises CheckpointError if it cannot be served."""
    if hint := hint_of(directory):
        raise CheckpointError(f"{directory}: {hint}")
    config = Config.read(directory / "config.json")
    name = config.optional("model_type")
    family = FAMILIES.get(name.removesuffix(_TEXT)) if isinstance(name, str) else None
    inside = family.inside if family and not str(name).endswith(_TEXT) else ()
    nested = bool(inside) and config.optional(inside[0]) is not None
    text = config.inside(*inside) if nested else config
    if isinstance(name, str) and not config.mentions(_OF_EXPERTS):
        got = f"got {shown(name)}, which has no experts"
        raise config.error(f"model_type: expected a model with experts, {got}")
    if not isinstance(name, str) or family is None:
        raise config.error(f"model_type: {_not_served(name)}")
    quantization = read_quantization((config, text) if nested else (config,))
    model = replace(describe(text, family), family=name, quantization=quantization)
    if not model.layers and not model.refused:
        raise config.error(f"expected MoE layers, got none: this {name} has no experts")
    return model


def _not_served(model_type: object) -> str:
    if isinstance(model_type, str) and model_type.removesuffix(_TEXT) in REFUSED:
        return f"expected another one, got {model_type}: {REFUSED[model_type.removesuffix(_TEXT)]}"
    return f"expected one of {', '.join(FAMILIES)}, got {shown(model_type)}"
