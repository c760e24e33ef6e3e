"""Reads a checkpoint's config.json with the reader of its family."""

import re
from dataclasses import replace
from pathlib import Path

from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.config import CheckpointError, Config
from expertd.service.checkpoints.families import FAMILIES
from expertd.service.checkpoints.model import MoEModel
from expertd.service.sentences import shown

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def read_model(directory: Path) -> MoEModel:
    """The model described by config.json in `directory`. Raises CheckpointError if it cannot be served."""
    if not directory.is_absolute() and not directory.exists() and _HUB_ID.fullmatch(str(directory)):
        raise CheckpointError(
            f"{directory}: expected a directory with a checkpoint, got none with that name; for a model "
            f"on the Hugging Face hub: hf download {directory} --local-dir {directory}"
        )
    config = Config.read(directory / "config.json")
    model_type = config.optional("model_type")
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise config.error(
            f"model_type: expected one of {', '.join(sorted(FAMILIES))}, got {model_type!r:.80}"
        )
    config.expect("hidden_act", "silu")
    _check_quantization(config)
    return replace(family(config), family=model_type)


def _check_quantization(config: Config) -> None:
    """Raise CheckpointError unless weights are FP8 with a scale per 128x128 block, or not quantized."""
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
