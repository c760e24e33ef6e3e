"""Which layers of a model have an MoE block: the rules that families follow."""

import re
from collections.abc import Callable

from expertd.service.checkpoints.config import Config

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
        every = config.integer("moe_layer_freq", default=1, least=1)
        return tuple(layer for layer in range(begin, end) if layer % every == 0)

    return rule


def sparse_step(config: Config, end: int) -> tuple[int, ...]:
    """Qwen's: each `decoder_sparse_step`th, except those in `mlp_only_layers`."""
    every = config.integer("decoder_sparse_step", default=1, least=1)
    dense = set(config.integers("mlp_only_layers"))
    return tuple(layer for layer in range(end) if (layer + 1) % every == 0 and layer not in dense)


def interleaved(config: Config, end: int) -> tuple[int, ...]:
    """Llama's: those in `moe_layers`, else each `interleave_moe_layer_step`th."""
    if config.optional("moe_layers") is not None:
        return tuple(layer for layer in config.integers("moe_layers") if 0 <= layer < end)
    every = config.integer("interleave_moe_layer_step", default=1, least=1)
    return tuple(range(every - 1, end, every))


def by_period(config: Config, end: int) -> tuple[int, ...]:
    """Jamba's: one in `expert_layer_period`, from `expert_layer_offset` on."""
    period = config.integer("expert_layer_period", default=2, least=1)
    offset = config.integer("expert_layer_offset", default=1)
    return tuple(layer for layer in range(end) if layer % period == offset)


def between(config: Config, end: int) -> tuple[int, ...]:
    """ERNIE's: from `moe_layer_start_index` to `moe_layer_end_index`, each `moe_layer_interval`th."""
    first = config.integer("moe_layer_start_index", default=1)
    last = config.integer("moe_layer_end_index", default=-1, least=-1)
    every = config.integer("moe_layer_interval", default=1, least=1)
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
