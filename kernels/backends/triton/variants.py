"""The closed list of kernels for a target: their constants, argument types, warps and pipelines."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch

from expertd.kernels.backends.triton.targets import Target
from expertd.kernels.request_table import MAX_GIVEN_TOP_K
from expertd.layout import Layout
from expertd.limits import MAX_EXPERTS
from expertd.weight_format import WeightFormat

Constant = int | bool

_FLOATS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
COLUMNS = 128  # of a tile: one scale of the weights for each block of K, and one of an activated row


@dataclass(frozen=True)
class TritonVariant:
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


HEIGHTS = (16, 32, 64, 128)
"""Rows of a GEMM's tile."""
LOW_HEIGHTS = HEIGHTS[:-1]
"""The same where low tiles do better, or where there are two sums: of gates, and of what they gate."""
FOUR_BIT_HEIGHTS = (16, 64)
"""The same for weights of four bits: few, as there are three formats of them."""
FOUR_BIT_STAGES = 6  # of 32 columns, not 128

ROUTER_TOKENS, ROUTER_EXPERTS, ROUTER_COLUMNS = 32, 64, 1024
"""Of a router's tile; its logits are as many sums as there are ROUTER_COLUMNS."""
EXPERT_COUNTS = (256, MAX_EXPERTS)
"""Experts among which a token's are chosen, at most."""
SLOTS = 32
"""Slots and expert groups of a token, at most, where kernels choose experts."""


@dataclass(frozen=True)
class Variants:
    """All that are compiled for a target; of GEMMs by the weights' format and the tile's height.

    Of routing by EXPERT_COUNTS, of the permutation by whether it has a `GroupTable`.
    """

    multiply: dict[tuple[WeightFormat, Layout, int], TritonVariant]
    multiply_gated: dict[tuple[WeightFormat, int], TritonVariant]
    permutation: dict[bool, TritonVariant]
    permute: dict[torch.dtype, TritonVariant]
    combine: dict[torch.dtype, TritonVariant]
    gather_rows: TritonVariant
    scatter_rows: TritonVariant
    router_logits: TritonVariant
    route_tokens: dict[int, TritonVariant]

    def __iter__(self) -> Iterator[TritonVariant]:
        yield from self.multiply.values()
        yield from self.multiply_gated.values()
        yield from self.permutation.values()
        yield from self.permute.values()
        yield from self.combine.values()
        yield self.gather_rows
        yield self.scatter_rows
        yield self.router_logits
        yield from self.route_tokens.values()


def heights(target: Target, weights: WeightFormat) -> tuple[int, ...]:
    """Rows of the tiles of a GEMM without an activation."""
    if weights is not WeightFormat.FP8:
        return FOUR_BIT_HEIGHTS
    return LOW_HEIGHTS if target.wide else HEIGHTS


def gated_heights(weights: WeightFormat) -> tuple[int, ...]:
    """The same of a GEMM with an activation."""
    return LOW_HEIGHTS if weights is WeightFormat.FP8 else FOUR_BIT_HEIGHTS


@cache
def variants_for(target: Target) -> Variants:
    """The variants for a target."""
    return Variants(
        {
            (weights, layout, height): _multiply(target, weights, layout, height)
            for weights in WeightFormat
            for layout in Layout
            for height in heights(target, weights)
        },
        {
            (weights, height): _multiply_gated(target, weights, height)
            for weights in WeightFormat
            for height in gated_heights(weights)
        },
        {looks_up: _permutation(looks_up) for looks_up in (False, True)},
        {
            **{dtype: _permute(name, f"*{name}", False) for dtype, name in _FLOATS.items()},
            torch.float8_e4m3fn: _permute("e4m3", "*u8", True),
        },
        {dtype: _combine(name) for dtype, name in _FLOATS.items()},
        _gather_rows(),
        _scatter_rows(),
        _router_logits(),
        {count: _route_tokens(count) for count in EXPERT_COUNTS},
    )


_SCALES = {
    WeightFormat.FP8: "*fp32",
    WeightFormat.MXFP4: "*u8",
    WeightFormat.INT4: "*i16",
    WeightFormat.NVFP4: "*i16",
}
"""How kernels read scales of weights: INT4's by words of 16 bits, NVFP4's two at a time."""


def _operands(target: Target, weights: WeightFormat) -> dict[str, str]:
    """The types of rows and weights; words of rows have two columns, as bytes of four-bit weights have."""
    codes = "*fp8e4nv" if target.fp8 else "*u8"
    a, b = (codes, codes) if weights is WeightFormat.FP8 else ("*i16", "*u8")
    return {"a": a, "a_scales": "*fp32", "b": b, "b_scales": _SCALES[weights], "b_whole": "*fp32"}


def _prefix(weights: WeightFormat) -> str:
    return "" if weights is WeightFormat.FP8 else f"{weights.lower()}_"


def _of_tile(
    target: Target, weights: WeightFormat, height: int, stages: int
) -> tuple[tuple[str, Constant], ...]:
    is_fp8 = weights is WeightFormat.FP8
    return (
        # Weights that are decoded in registers are multiplied from there as the larger side alone.
        ("SWAP", target.wide and (height < 64 or not is_fp8)),
        ("FP8", target.fp8 and is_fp8),
        ("BLOCK_M", height),
        ("BLOCK_N", COLUMNS),
        ("STAGES", stages),
    )


def _weights(weights: WeightFormat) -> tuple[str, Constant]:
    return "WEIGHTS", tuple(WeightFormat).index(weights)


def _multiply(target: Target, weights: WeightFormat, layout: Layout, height: int) -> TritonVariant:
    is_fp8 = weights is WeightFormat.FP8
    stages = (4 if target.large else 3) if is_fp8 else FOUR_BIT_STAGES
    types = {
        **_operands(target, weights),
        "extents": "*i32", "out": "*bf16", "bias": "*bf16",
        "num_groups": "i32", "n": "i32", "k": "i32", "stride": "i32",
        "scale_group_stride": "i64", "scale_row_stride": "i64", "scale_column_stride": "i64",
        "scales_of_block": "i32", "scale_dtype": "i32", "has_bias": "i32",
    }  # fmt: skip
    return TritonVariant(
        f"{_prefix(weights)}{layout.value}_m{height}",
        ("gemm", "multiply"),
        tuple(types.items()),
        (_weights(weights), ("MASKED", layout is Layout.MASKED), *_of_tile(target, weights, height, stages)),
        (("a", 16), ("b", 16), ("out", 16), ("bias", 16), ("n", 8), ("k", 16)),
        4 if height <= (64 if target.wide and is_fp8 else 32) else 8,
        stages,
    )


def _multiply_gated(target: Target, weights: WeightFormat, height: int) -> TritonVariant:
    is_fp8 = weights is WeightFormat.FP8
    stages = (4 if target.wide and height == 64 else 3) if is_fp8 else FOUR_BIT_STAGES
    types = {
        **_operands(target, weights),
        "offsets": "*i32", "out": "*u8", "out_scales": "*fp32", "bias": "*bf16",
        "num_groups": "i32", "num_rows": "i32", "n": "i32", "k": "i32",
        "scale_row_stride": "i64", "scale_column_stride": "i64",
        "scales_of_block": "i32", "scale_dtype": "i32", "has_bias": "i32",
        "alpha": "fp32", "limit": "fp32", "up_offset": "fp32", "clamp_after": "i32",
    }  # fmt: skip
    return TritonVariant(
        f"{_prefix(weights)}gated_m{height}",
        ("gemm", "multiply_gated"),
        tuple(types.items()),
        (_weights(weights), *_of_tile(target, weights, height, stages)),
        (("a", 16), ("b", 16), ("out", 16), ("bias", 16), ("n", 16), ("k", 16)),
        4 if height < 64 and target.wide else 8,
        stages,
    )


def _permutation(looks_up: bool) -> TritonVariant:
    types = {
        "ids": "*i32", "inverse": "*i32", "offsets": "*i32", "groups": "*i32", "seen": "*i32",
        "num_pairs": "i32", "num_groups": "i32", "num_ids": "i32",
    }  # fmt: skip
    name = "permutation_looks_up" if looks_up else "permutation"
    constants = (("LOOKS_UP", looks_up), ("BLOCK", 2048))
    return TritonVariant(name, ("rows", "permutation"), tuple(types.items()), constants, (), 4)


def _permute(name: str, tokens: str, quantized: bool) -> TritonVariant:
    types = {
        "tokens": tokens, "token_scales": "*fp32", "inverse": "*i32", "data": "*u8", "scales": "*fp32",
        "top_k": "i32", "k": "i32", "num_rows": "i32",
        "token_stride": "i64", "scale_row_stride": "i64", "scale_column_stride": "i64",
    }  # fmt: skip
    constants = (("QUANTIZED", quantized), ("BLOCKS", 8))
    multiples = (("tokens", 16), ("data", 16), ("token_stride", 16), ("k", 16))
    return TritonVariant(
        f"permute_{name}", ("rows", "permute"), tuple(types.items()), constants, multiples, 4
    )


def _combine(name: str) -> TritonVariant:
    types = {
        "rows": "*bf16", "inverse": "*i32", "weights": "*fp32", "out": f"*{name}", "top_k": "i32", "n": "i32",
    }  # fmt: skip
    multiples = (("rows", 16), ("out", 16), ("n", 16))
    constants = (("BLOCK", 1024),)
    return TritonVariant(
        f"combine_{name}", ("rows", "combine"), tuple(types.items()), constants, multiples, 4
    )


def _gather_rows() -> TritonVariant:
    types = {
        "table": "i64", "hidden_states": "*bf16", "topk_ids": "*i32", "topk_weights": "*fp32",
        "h": "i32", "top_k": "i32", "num_experts": "i32",
    }  # fmt: skip
    constants, multiples = (("BLOCK", 2048), ("SLOTS", MAX_GIVEN_TOP_K)), (("hidden_states", 16), ("h", 16))
    return TritonVariant(
        "gather_rows", ("table", "gather_rows"), tuple(types.items()), constants, multiples, 4
    )


def _scatter_rows() -> TritonVariant:
    types = {"table": "i64", "rows": "*fp32", "h": "i32"}
    constants, multiples = (("BLOCK", 2048),), (("rows", 16), ("h", 16))
    return TritonVariant(
        "scatter_rows", ("table", "scatter_rows"), tuple(types.items()), constants, multiples, 4
    )


def _router_logits() -> TritonVariant:
    types = {
        "tokens": "*bf16", "router": "*bf16", "logits": "*fp32",
        "num_tokens": "i32", "num_experts": "i32", "k": "i32",
    }  # fmt: skip
    stages = 3
    constants = (
        ("TOKENS", ROUTER_TOKENS), ("EXPERTS", ROUTER_EXPERTS), ("PART", ROUTER_COLUMNS), ("STAGES", stages),
    )  # fmt: skip
    multiples = (("tokens", 16), ("router", 16), ("k", 16))
    place = "router", "router_logits"
    return TritonVariant("router_logits", place, tuple(types.items()), constants, multiples, 4, stages)


def _route_tokens(count: int) -> TritonVariant:
    types = {
        "logits": "*fp32", "bias": "*fp32", "end_token": "*i32", "topk_ids": "*i32", "topk_weights": "*fp32",
        "parts": "i32", "num_experts": "i32", "top_k": "i32", "is_softmax": "i32", "is_bias_on_logits": "i32",
        "renormalize": "i32", "factor": "fp32", "num_groups": "i32", "topk_group": "i32",
        "has_bias": "i32", "has_end": "i32",
    }  # fmt: skip
    constants, warps = (("EXPERTS", count), ("SLOTS", SLOTS)), count // 256
    place = "router", "route_tokens"
    return TritonVariant(f"route_tokens_{count}", place, tuple(types.items()), constants, (), warps)
