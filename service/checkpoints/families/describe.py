"""Describes the MoE layers of a model by its family's row and its config.json."""

from dataclasses import replace
from typing import Any

from expertd.activation import COMMON, ExpertRule
from expertd.limits import MAX_EXPERTS
from expertd.service.checkpoints.config import Config
from expertd.service.checkpoints.families import keys
from expertd.service.checkpoints.families.family import Family
from expertd.service.checkpoints.model import MoEModel, Names
from expertd.service.util.sentences import shown

_HASHED = "hash_moe"


def describe(config: Config, family: Family) -> MoEModel:
    """The model whose language model has this configuration. Raises CheckpointError."""
    config = config.with_nulls(family.nulls)
    _check(config, family)
    num_layers = config.integer("num_hidden_layers")
    end = num_layers + (config.integer(*keys.NEXT_TOKEN, default=0) if family.next_token else 0)
    intermediate = config.size(family.intermediate, step=family.step)
    layers, refused = family.layers(config, end), _refused(config, family)
    return MoEModel(
        layers=tuple(layer for layer in layers if layer not in refused),
        hidden_size=config.size("hidden_size", step=family.step),
        intermediate_size=intermediate,
        num_experts=config.integer(*keys.EXPERTS, least=1, most=MAX_EXPERTS),
        top_k=config.integer(*keys.TOP_K, least=1),
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
    for key in keys.SCORING:
        config.expect(key, family.router.scoring)
    for key in keys.RULE:
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
        renormalize = config.boolean(*keys.RENORMALIZE, default=renormalize)
    for key in keys.RENORMALIZE if router.always else ():
        config.expect(key, router.renormalize)
    for key in keys.SCALE if router.scale is None else ():
        config.expect(key, 1)
    for key in (*keys.GROUPS, *keys.TOP_GROUPS) if router.groups is None else ():
        config.expect(key, 1, 0)
    routing: dict[str, Any] = {"scoring_func": router.scoring, "renormalize": renormalize}
    if router.scale is not None:
        routing["routed_scaling_factor"] = config.number(*keys.SCALE, default=router.scale)
    if router.groups is not None:
        groups, chosen = router.groups
        routing["num_expert_groups"] = config.integer(*keys.GROUPS, default=groups, least=1)
        routing["topk_group"] = config.integer(*keys.TOP_GROUPS, default=chosen, least=1)
    if router.group_score != "best_two":
        routing["group_score"] = router.group_score
    if router.bias_on != "choice":
        routing["bias_on"] = router.bias_on
    return routing


def _shared(config: Config, family: Family, intermediate: int) -> int:
    """The shared expert's size, in sizes of a routed one."""
    shared = family.shared
    if shared is None:
        for key in keys.SHARED:
            if config.optional(key) not in (None, 0):
                raise config.error(f"{key}: expected none, got {shown(config.optional(key))}")
        return 0
    if shared.fixed:
        return shared.count or 0
    if shared.size_key is None:
        return config.integer(*keys.SHARED, default=shared.count)
    size = config.integer(shared.size_key)
    if size % intermediate:
        expected = f"a multiple of {family.intermediate} ({intermediate})"
        raise config.error(f"{shared.size_key}: expected {expected}, got {size}")
    return size // intermediate
