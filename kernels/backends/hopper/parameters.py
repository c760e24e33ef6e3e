"""What a launch of csrc/grouped_gemm.cu passes: one struct, with the layout of csrc/parameters.cuh.

Fields have the names of the device's, where their comments are. `output` is that of the variant's epilogue.
"""

import struct
from collections.abc import Iterator
from ctypes import Structure, c_float, c_int32, c_uint8, c_uint32, c_uint64, c_void_p, sizeof

TensorMapWords = c_uint64 * 16  # opaque
_ALIGNMENT = 64  # of a tensor map, and so of the struct


class ScalesStruct(Structure):
    """The scales of both operands."""

    _fields_ = (
        ("a", c_void_p),
        ("a_stride_group", c_uint32),
        ("a_stride_m", c_uint32),
        ("a_stride_k", c_uint32),
        ("b", c_void_p),
    )


class Cut(Structure):
    """How rows are cut into tiles."""

    _fields_ = (("tile_steps", c_int32), ("tall_first", c_int32))


class Columns(Structure):
    """The columns of out that a launch computes."""

    _fields_ = (("first", c_int32), ("count", c_int32))


class GroupsStruct(Structure):
    """The groups of a launch, and what it computes of them; csrc/scheduler.cuh."""

    _fields_ = (
        ("extents", c_void_p),
        ("num_groups", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("max_rows", c_int32),
        ("rows_per_group", c_int32),
        ("cut", Cut),
        ("columns", Columns),
    )


class Bf16Output(Structure):
    """The output of Bf16Epilogue and SwapAbEpilogue."""

    _fields_ = (("out", c_void_p),)


class SwigluStruct(Structure):
    """Arguments of an activation: csrc/activation_swiglu.cuh."""

    _fields_ = (("alpha", c_float), ("limit", c_float))


class OtherGluStruct(Structure):
    """The same, of csrc/activation_other_glu.cuh."""

    _fields_ = (
        ("alpha", c_float),
        ("limit", c_float),
        ("bias", c_void_p),
        ("up_offset", c_float),
        ("clamp_after", c_int32),
    )


class SwigluOutput(Structure):
    """The output of GluEpilogue<Swiglu>."""

    _fields_ = (
        ("out", c_void_p),
        ("scales", c_void_p),
        ("scale_stride", c_uint32),
        ("activation", SwigluStruct),
    )


class OtherGluOutput(Structure):
    """The output of GluEpilogue<OtherGlu>."""

    _fields_ = (
        ("out", c_void_p),
        ("scales", c_void_p),
        ("scale_stride", c_uint32),
        ("activation", OtherGluStruct),
    )


def _fields(output: type[Structure]) -> tuple[tuple[str, type], ...]:
    return (
        ("a_map", TensorMapWords),
        ("b_map", TensorMapWords),
        ("out_map", TensorMapWords),
        ("scales", ScalesStruct),
        ("groups", GroupsStruct),
        ("output", output),
        ("extents_ready", c_int32),
        ("tile_counter", c_void_p),
    )


def _parameters(output: type[Structure]) -> type[Structure]:
    """The struct for an output. ctypes aligns none to 64 bytes, so the end of it is a field."""
    unpadded = type("Unpadded", (Structure,), {"_fields_": _fields(output)})
    padding = -sizeof(unpadded) % _ALIGNMENT
    fields = (*_fields(output), ("padding", c_uint8 * padding))
    return type(f"Parameters{output.__name__}", (Structure,), {"_fields_": fields})


def leaves(kind: type[Structure], prefix: str = "", start: int = 0) -> Iterator[tuple[str, type, int]]:
    """(name, type, offset) of every value in a struct, in order."""
    for name, of, *_ in kind._fields_:
        at = start + getattr(kind, name).offset
        if issubclass(of, Structure):
            yield from leaves(of, f"{prefix}{name}.", at)
        elif name != "padding":
            yield prefix + name, of, at


_CODES = {TensorMapWords: "128s", c_void_p: "Q", c_int32: "i", c_uint32: "I", c_float: "f"}


def _packer(kind: type[Structure]) -> struct.Struct:
    """Packs the values of `leaves`, in a tenth of the time that ctypes takes for the struct."""
    parts, end = ["="], 0
    for _, of, at in leaves(kind):
        parts.append(f"{at - end}x{_CODES[of]}")
        end = at + sizeof(of)
    return struct.Struct("".join(parts) + f"{sizeof(kind) - end}x")


PARAMETERS: dict[str, type[Structure]] = {
    "Bf16Epilogue": _parameters(Bf16Output),
    "SwapAbEpilogue": _parameters(Bf16Output),
    "GluEpilogue<Swiglu>": _parameters(SwigluOutput),
    "GluEpilogue<OtherGlu>": _parameters(OtherGluOutput),
    "SwapAbGluEpilogue<Swiglu>": _parameters(SwigluOutput),
    "SwapAbGluEpilogue<OtherGlu>": _parameters(OtherGluOutput),
}
"""A launch's struct, by the type of its epilogue."""

PACKERS = {epilogue: _packer(kind) for epilogue, kind in PARAMETERS.items()}
"""What packs it: tensor maps as bytes, addresses as integers."""
