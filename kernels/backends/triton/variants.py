"""The closed list of kernels for a target: their constants, argument types, warps and pipelines."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from expertd.kernels.backends.triton.targets import Target
from expertd.layout import Layout

Constant = int | bool

_FLOATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
COLUMNS = 128  # of a tile: one scale of the weights for each block of K, and one of an activated row


@dataclass(frozen=True)
class Variant:
    """How to compile a kernel.

    name       unique for a target
    place      module of `device`, and the function in it
    types      of the arguments, in Triton's notation, in their order; a constant has none
    multiples  of 8 or 16 that integers are, and pointers in bytes
    warps      of a CTA
    stages     blocks of K in flight
    """

    name: str
    place: tuple[str, str]
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    multiples: tuple[tuple[str, int], ...]
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class Tile:
    """Rows of a GEMM's tile, and the warps that compute it."""

    rows: int
    warps: int


TILES = (Tile(16, 4), Tile(32, 4), Tile(64, 8), Tile(128, 8))


@dataclass(frozen=True)
class Variants:
    """All that are compiled for a target."""

    multiply: dict[tuple[Layout, Tile], Variant]
    multiply_gated: dict[Tile, Variant]
    permutation: Variant
    permute: dict[torch.dtype, Variant]
    combine: dict[torch.dtype, Variant]

    def __iter__(self) -> Iterator[Variant]:
        yield from self.multiply.values()
        yield from self.multiply_gated.values()
        yield self.permutation
        yield from self.permute.values()
        yield from self.combine.values()


@cache
def variants_for(target: Target) -> Variants:
    """The variants for a target."""
    return Variants(
        {(layout, tile): _multiply(target, layout, tile) for layout in Layout for tile in TILES},
        {tile: _multiply_gated(target, tile) for tile in TILES},
        _permutation(),
        {
            **{dtype: _permute(name, f"*{name}", False) for dtype, name in _FLOATS.items()},
            torch.float8_e4m3fn: _permute("e4m3", "*u8", True),
        },
        {dtype: _combine(name) for dtype, name in _FLOATS.items()},
    )


def _codes(target: Target) -> str:
    return "*fp8e4nv" if target.fp8 else "*u8"


def _of_tile(target: Target, tile: Tile, stages: int) -> tuple[tuple[str, Constant], ...]:
    return (
        ("SWAP", target.wide and tile.rows < 64),
        ("FP8", target.fp8),
        ("BLOCK_M", tile.rows),
        ("BLOCK_N", COLUMNS),
        ("STAGES", stages),
    )


def _multiply(target: Target, layout: Layout, tile: Tile) -> Variant:
    stages = 4 if target.large else 3
    types = {
        "a": _codes(target), "a_scales": "*fp32", "b": _codes(target), "b_scales": "*fp32",
        "extents": "*i32", "out": "*bf16", "bias": "*bf16",
        "num_groups": "i32", "n": "i32", "k": "i32", "stride": "i32",
        "scale_group_stride": "i64", "scale_row_stride": "i64", "scale_column_stride": "i64", "has_bias": "i32",
    }  # fmt: skip
    return Variant(
        f"{layout.value}_m{tile.rows}",
        ("gemm", "multiply"),
        tuple(types.items()),
        (("MASKED", layout is Layout.MASKED), *_of_tile(target, tile, stages)),
        (("a", 16), ("b", 16), ("out", 16), ("bias", 16), ("n", 8), ("k", 16)),
        tile.warps,
        stages,
    )


def _multiply_gated(target: Target, tile: Tile) -> Variant:
    stages = 3
    types = {
        "a": _codes(target), "a_scales": "*fp32", "b": _codes(target), "b_scales": "*fp32",
        "offsets": "*i32", "out": "*u8", "out_scales": "*fp32", "bias": "*bf16",
        "num_groups": "i32", "num_rows": "i32", "n": "i32", "k": "i32",
        "scale_row_stride": "i64", "scale_column_stride": "i64", "has_bias": "i32",
        "alpha": "fp32", "limit": "fp32", "up_offset": "fp32", "clamp_after": "i32",
    }  # fmt: skip
    return Variant(
        f"gated_m{tile.rows}",
        ("gemm", "multiply_gated"),
        tuple(types.items()),
        _of_tile(target, tile, stages),
        (("a", 16), ("b", 16), ("out", 16), ("bias", 16), ("n", 16), ("k", 16)),
        tile.warps,
        stages,
    )


def _permutation() -> Variant:
    types = {"ids": "*i32", "inverse": "*i32", "offsets": "*i32", "num_pairs": "i32", "num_groups": "i32"}
    constants = (("BLOCK", 2048),)
    return Variant("permutation", ("rows", "permutation"), tuple(types.items()), constants, (), 4)


def _permute(name: str, tokens: str, quantized: bool) -> Variant:
    types = {
        "tokens": tokens, "token_scales": "*fp32", "inverse": "*i32", "data": "*u8", "scales": "*fp32",
        "top_k": "i32", "k": "i32", "num_rows": "i32",
        "token_stride": "i64", "scale_row_stride": "i64", "scale_column_stride": "i64",
    }  # fmt: skip
    constants = (("QUANTIZED", quantized), ("BLOCKS", 8))
    multiples = (("tokens", 16), ("data", 16), ("token_stride", 16), ("k", 16))
    return Variant(f"permute_{name}", ("rows", "permute"), tuple(types.items()), constants, multiples, 4)


def _combine(name: str) -> Variant:
    types = {
        "rows": "*bf16", "inverse": "*i32", "weights": "*fp32", "out": f"*{name}", "top_k": "i32", "n": "i32",
    }  # fmt: skip
    multiples = (("rows", 16), ("out", 16), ("n", 16))
    constants = (("BLOCK", 1024),)
    return Variant(f"combine_{name}", ("rows", "combine"), tuple(types.items()), constants, multiples, 4)
