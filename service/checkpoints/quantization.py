"""What config.json and hf_quant_config.json say of how a checkpoint's weights are quantized."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.config import CheckpointError, Config, read_json_object
from expertd.service.sentences import all_of, shown

_BLOCK = [SCALE_BLOCK, SCALE_BLOCK]
_ALGORITHMS = {"FP8", "NVFP4", "W4A16_NVFP4", "MXFP8"}
_MIXED = "MIXED_PRECISION"
_FILE = "hf_quant_config.json"
_HINT = "; with requantize: allow, weights are rounded to that FP8"


def check_quantization(configs: tuple[Config, ...], requantize: bool) -> None:
    """Raise CheckpointError unless weights are FP8 with a scale per 128x128 block or per tensor, or floats.

    requantize: whether other encodings may be rounded to that FP8. Whether the tensors are as described
    here is seen when they are found.
    """
    for where, given in _described(configs):
        if not isinstance(given, dict):
            raise CheckpointError(f"{where}: expected an object, got {shown(given)}")
        possible = _can_be_requantized(given)
        if _is_native(given) or (requantize and possible):
            continue
        block, scheme = given.get("weight_block_size"), given.get("activation_scheme", "dynamic")
        expected = f"{_in_words('fp8', _BLOCK, 'dynamic')}, or no such object"
        hint = _HINT if possible else ""
        raise CheckpointError(
            f"{where}: expected {expected}, got {_in_words(_method(given), block, scheme)}{hint}"
        )
    for config in configs:
        if config.optional("expert_dtype") == "fp4" and not requantize:
            raise config.error(f"expert_dtype: expected fp8, got fp4{_HINT}")


def _described(configs: tuple[Config, ...]) -> Iterator[tuple[str, Any]]:
    """The descriptions, and where they are; a file of its own counts if config.json has none."""
    found = False
    for config in configs:
        for name in ("quantization_config", "compression_config"):
            given = config.optional(name)
            if given is not None:
                found = True
                yield f"{config.path}: {name}", given
    path = configs[0].path.parent / _FILE
    if not found and _is_there(path):
        yield f"{path}: quantization", read_json_object(path).get("quantization")


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _method(given: Mapping[str, Any]) -> Any:
    method = given.get("quant_method")
    return given.get("quant_algo") if method in (None, "modelopt") else method


def _in_words(method: Any, block: Any, scheme: Any) -> str:
    values = {"quant_method": method, "weight_block_size": block, "activation_scheme": scheme}
    return all_of([f"{name} {shown(value)}" for name, value in values.items()])


def _is_native(given: Mapping[str, Any]) -> bool:
    if given.get("quant_method") == "compressed-tensors":
        weights = list(_groups(given))
        return bool(weights) and all(
            _bits(group) == (8, "float")
            and (group.get("block_structure") == _BLOCK or group.get("strategy") == "tensor")
            for group in weights
        )
    if given.get("quant_method") in (None, "modelopt") and given.get("quant_algo") == "FP8":
        return True  # a scale per tensor
    if given.get("quant_algo") is not None:
        return False  # beside FP8, other encodings
    scheme = given.get("activation_scheme", "dynamic")
    return (given.get("quant_method"), given.get("weight_block_size"), scheme) == ("fp8", _BLOCK, "dynamic")


def _can_be_requantized(given: Mapping[str, Any]) -> bool:
    """Whether `encodings` knows the form; other tensors, such as zero points, are refused when found."""
    method, algorithm = given.get("quant_method"), given.get("quant_algo")
    if method == "compressed-tensors":
        known = {(8, "float"), (4, "float"), (4, "int")}
        weights = list(_groups(given))
        plain = given.get("transform_config") in (None, {})
        return (
            plain
            and bool(weights)
            and all(_bits(group) in known and group.get("symmetric", True) is True for group in weights)
        )
    if method in (None, "modelopt") or algorithm is not None:
        layers = given.get("quantized_layers")
        layers = layers if isinstance(layers, dict) else {}
        used = {layer.get("quant_algo") for layer in layers.values() if isinstance(layer, dict)}
        return algorithm in _ALGORITHMS or (algorithm == _MIXED and used <= _ALGORITHMS)
    return method == "mxfp4" or (method == "fp8" and given.get("weight_block_size") in (None, _BLOCK))


def _groups(given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What compressed-tensors says of the weights of each group of modules."""
    groups = given.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        yield weights if isinstance(weights, dict) else {}


def _bits(weights: Mapping[str, Any]) -> tuple[Any, Any]:
    return weights.get("num_bits"), weights.get("type")
