"""Reads a checkpoint's config.json with the reader of its family."""

import re
from dataclasses import replace
from pathlib import Path

from expertd.service.checkpoints.config import CheckpointError, Config
from expertd.service.checkpoints.families import FAMILIES, describe
from expertd.service.checkpoints.families.refused import REFUSED
from expertd.service.checkpoints.hints import hint_of
from expertd.service.checkpoints.model import MoEModel
from expertd.service.checkpoints.quantization import read_quantization
from expertd.service.util.sentences import shown

_OF_EXPERTS = re.compile("expert|moe")
_TEXT = "_text"  # what follows a model_type if config.json is only that of the language model


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
