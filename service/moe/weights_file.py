"""The tensors that a weights file must contain. Reads only headers, and does not import torch."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from expertd.service.moe.shape import LayerShape
from expertd.service.moe.tensor_file import TensorFile
from expertd.weight_format import WeightFormat, WeightLayout

BIASES = ("gate_up_bias", "down_bias")
OPTIONAL = frozenset({"router_bias", "shared_gate", *BIASES})
_MAX_NAMES = 3


class TensorSpec(NamedTuple):
    """A tensor's required shape and allowed dtypes, with safetensors' names."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


def tensor_specs(shape: LayerShape) -> dict[str, TensorSpec]:
    """The tensors of a layer's file by name; those in `OPTIONAL` may be missing."""
    e, g, h, i = shape.num_experts, shape.num_groups, shape.hidden_size, shape.intermediate_size
    routed = len(shape.held_experts) if shape.splits_shared else g
    shared_gate = {"shared_gate": TensorSpec((h,), ("F32",))} if shape.num_shared_experts else {}
    return shared_gate | {
        "router": TensorSpec((e, h), ("F32", "BF16")),
        "router_bias": TensorSpec((e,), ("F32",)),
        **_matrix_specs("gate_up", shape.weight_layout, routed, 2 * i, h),
        **_matrix_specs("down", shape.weight_layout, routed, h, i),
        "gate_up_bias": TensorSpec((g, 2 * i), ("BF16",)),
        "down_bias": TensorSpec((g, h), ("BF16",)),
        **(_shared_specs(shape) if shape.splits_shared else {}),
    }


def _shared_specs(shape: LayerShape) -> dict[str, TensorSpec]:
    """Those of the shared experts' matrices, where they are apart; no file has them."""
    count, h, i = shape.num_shared_experts, shape.hidden_size, shape.intermediate_size
    return _matrix_specs("shared_gate_up", shape.shared_layout, count, 2 * i, h) | _matrix_specs(
        "shared_down", shape.shared_layout, count, h, i
    )


def _matrix_specs(name: str, layout: WeightLayout, count: int, n: int, k: int) -> dict[str, TensorSpec]:
    """The tensors of `count` matrices [n, k]."""
    is_fp8 = layout.format is WeightFormat.FP8
    data = TensorSpec((count, n, k), ("F8_E4M3",)) if is_fp8 else TensorSpec((count, n, k // 2), ("U8",))
    scales = TensorSpec((count, *layout.scale_shape(n, k)), (layout.scales,))
    whole = {f"{name}_whole": TensorSpec((count, n), ("F32",))} if layout.has_whole else {}
    return {name: data, f"{name}_scale": scales} | whole


def check_weights_file(path: Path, shape: LayerShape) -> None:
    """Raise ValueError unless `path` can be read and has exactly the layer's tensors."""
    with TensorFile(path) as file:
        check_tensors(file, shape)


def check_tensors(file: TensorFile, shape: LayerShape) -> None:
    """Raise ValueError unless an open file has exactly the layer's tensors."""
    specs, names = tensor_specs(shape), file.tensors.keys()
    _check_names(file.path, specs.keys() - OPTIONAL, names - (OPTIONAL & specs.keys()))
    given = [name for name in BIASES if name in names]
    if len(given) == 1:
        raise ValueError(
            f"{file.path}: {' and '.join(BIASES)}: expected both or neither, got {given[0]} alone"
        )
    for name in (name for name in specs if name in names):
        tensor = file.tensors[name]
        check_tensor(f"{file.path}: {name}", specs[name], TensorSpec(tensor.shape, (tensor.dtype,)))


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
    named = ", ".join(f"{ascii(name)[1:-1]:.60}" for name in sorted(names)[:_MAX_NAMES])
    return named if len(names) <= _MAX_NAMES else f"{named} and {len(names) - _MAX_NAMES} more"
