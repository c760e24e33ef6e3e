"""What a checkpoint's config.json says of its MoE layers."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertd.service.checkpoints.config import SCALE_BLOCK, Config, shown

MAX_EXPERTS = 1024


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
    intermediate_size, which the checkpoint keeps as one expert of their sizes together.
    """

    layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    routing: dict[str, Any]
    names: Names
    num_shared_experts: int = 0


Family = Callable[[Config], MoEModel]


def read_model(directory: Path) -> MoEModel:
    """What config.json in `directory` says. Raises CheckpointError for a model that cannot be served."""
    # Here, since every family is written in terms of this module.
    from expertd.service.checkpoints.families import FAMILIES

    config = Config.read(directory / "config.json")
    model_type = config.optional("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise config.error(
            f"model_type: expected one of {', '.join(sorted(FAMILIES))}, got {model_type!r:.80}"
        )
    config.expect("hidden_act", "silu")
    _check_quantization(config)
    return family(config)


def _check_quantization(config: Config) -> None:
    """FP8 with a scale per 128x128 block, or weights that are not quantised."""
    for name in ("quantization_config", "compression_config"):
        given = config.optional(name)
        if given is None:
            continue
        if not isinstance(given, dict):
            raise config.error(f"{name}: expected an object, got {type(given).__name__}")
        method, block = given.get("quant_method"), given.get("weight_block_size")
        scheme = given.get("activation_scheme", "dynamic")
        expected, got = ("fp8", [SCALE_BLOCK, SCALE_BLOCK], "dynamic"), (method, block, scheme)
        if got != expected:
            keys = "(quant_method, weight_block_size, activation_scheme)"
            raise config.error(f"{name} {keys}: expected {expected} or no such object, got {shown(got)}")
