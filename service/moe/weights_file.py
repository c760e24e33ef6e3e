"""The tensors that a weights file must contain. Reads only headers, and does not import torch."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from expertd.limits import SCALE_BLOCK
from expertd.service.files import check_readable
from expertd.service.moe.shape import LayerShape

OPTIONAL = frozenset({"router_bias", "shared_gate"})
_MOST_NAMES = 3


class TensorSpec(NamedTuple):
    """A tensor's required shape and allowed dtypes, with safetensors' names."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def tensor_specs(shape: LayerShape) -> dict[str, TensorSpec]:
    """The tensors of a layer's file by name; those in `OPTIONAL` may be missing."""
    e, g, h, i = shape.num_experts, shape.num_groups, shape.hidden_size, shape.intermediate_size
    shared_gate = {"shared_gate": TensorSpec((h,), ("F32",))} if shape.num_shared_experts else {}
    return shared_gate | {
        "router": TensorSpec((e, h), ("F32", "BF16")),
        "router_bias": TensorSpec((e,), ("F32",)),
        "gate_up": TensorSpec((g, 2 * i, h), ("F8_E4M3",)),
        "gate_up_scale": TensorSpec((g, 2 * i // SCALE_BLOCK, h // SCALE_BLOCK), ("F32",)),
        "down": TensorSpec((g, h, i), ("F8_E4M3",)),
        "down_scale": TensorSpec((g, h // SCALE_BLOCK, i // SCALE_BLOCK), ("F32",)),
    }


def check_weights_file(path: Path, shape: LayerShape) -> None:
    """Raise ValueError unless `path` can be read and has exactly the layer's tensors."""
    check_readable(path)
    specs = tensor_specs(shape)
    try:
        with safe_open(path, framework="np") as file:
            names = set(file.keys())
            _check_names(path, specs.keys() - OPTIONAL, names - (OPTIONAL & specs.keys()))
            for name in (name for name in specs if name in names):
                tensor = file.get_slice(name)
                got = TensorSpec(tuple(tensor.get_shape()), (str(tensor.get_dtype()),))
                check_tensor(f"{path}: {name}", specs[name], got)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: expected a safetensors file, got: {error}") from error


def check_tensor(name: str, expected: TensorSpec, got: TensorSpec) -> None:
    """Raise ValueError (name, expected, got) unless the shape is as expected and the dtype is allowed."""
    if got.shape != expected.shape:
        raise ValueError(f"{name} shape: expected {expected.shape}, got {got.shape}")
    if got.dtypes[0] not in expected.dtypes:
        raise ValueError(f"{name} dtype: expected {' or '.join(expected.dtypes)}, got {got.dtypes[0]}")


def _check_names(path: Path, expected: Collection[str], got: Collection[str]) -> None:
    missing, unknown = set(expected) - set(got), set(got) - set(expected)
    if missing or unknown:
        wanted = f"{', '.join(sorted(expected))} (and optionally {', '.join(sorted(OPTIONAL))})"
        raise ValueError(f"{path}: expected tensors {wanted}, got {', and '.join(_found(missing, unknown))}")


def _found(missing: Collection[str], unknown: Collection[str]) -> Iterator[str]:
    if missing:
        yield f"no {_some(missing)}"
    if unknown:
        yield f"{len(unknown)} unknown: {_some(unknown)}"


def _some(names: Collection[str]) -> str:
    """The first few names, shortened and in ASCII, and the number of the others."""
    named = ", ".join(f"{ascii(name)[1:-1]:.60}" for name in sorted(names)[:_MOST_NAMES])
    return named if len(names) <= _MOST_NAMES else f"{named} and {len(names) - _MOST_NAMES} more"
