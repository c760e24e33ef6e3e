"""Four bits on Hopper against float64, and MXFP4 against the same numbers in FP8; outputs poisoned."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd.kernels import (
    ExpertBiases,
    FourBits,
    OtherGlu,
    Quantized,
    Swiglu,
    WeightFormat,
    decode,
    dequantize_rows,
    fused_experts,
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    quantize_rows,
)
from expertd.kernels.backends.hopper import tiles
from expertd.kernels.backends.hopper.backend import HopperBackend
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm, Groups
from expertd.kernels.backends.hopper.launch import Kernels
from expertd.kernels.backends.hopper.packed_weights import MOST_SPREAD, pack, unpack_mxfp4
from expertd.kernels.backends.hopper.plans import GemmPlan
from expertd.kernels.backends.streams import current_stream
from expertd.kernels.ops.activation import Activation
from expertd.kernels.ops.four_bits import (
    groups_of,
    mapped,
    quantize_int4,
    quantize_mxfp4,
    quantize_nvfp4,
    tensors_of,
)
from tests.kernels.helpers import (
    DEQUANTIZED_TOLERANCE,
    diff,
    expect_contiguous,
    expect_masked,
    expected_experts,
    fresh_generator,
    poisoned,
    random_contiguous,
    random_masked,
    random_rows,
    untouched,
)

pytestmark = pytest.mark.gpu
each_tile = pytest.mark.parametrize("config", tiles.MXFP4_CONFIGS, ids=lambda config: config.name)
SIZES = [(1, 128, 128, 5), (5, 256, 640, 40), (4, 576, 384, 150), (33, 264, 1024, 100), (7, 1160, 2816, 300)]
Quantize = Callable[[Tensor], FourBits]
QUANTIZE: dict[tuple[WeightFormat, int], Quantize] = {
    (WeightFormat.MXFP4, 32): quantize_mxfp4,
    (WeightFormat.INT4, 128): partial(quantize_int4, group_size=128, dtype=torch.float16),
    (WeightFormat.INT4, 32): quantize_int4,
    (WeightFormat.NVFP4, 16): quantize_nvfp4,
}
each_format = pytest.mark.parametrize(
    "weights", tiles.FOUR_BITS, ids=lambda weights: f"{weights[0]}-{weights[1]}"
)
each_tile_of_all = pytest.mark.parametrize(
    ("weights", "config"),
    [(weights, tile) for weights, of in tiles.FOUR_BITS.items() for tile in dict.fromkeys(of.plain)],
    ids=lambda each: each.name if isinstance(each, tiles.TileConfig) else "",
)
ACTIVATIONS = [
    Swiglu(),
    Swiglu(1.0, 2.0),
    OtherGlu(1.702, 7.0, 1.0),
    OtherGlu(1.0, 5.0, 0.0, clamp_after=True),
]


def planned(config: tiles.TileConfig) -> HopperBackend:
    """A backend whose GEMMs all run with this tile."""
    return HopperBackend(choose=lambda *_: GemmPlan(config, 16 * config.steps))


def random_mxfp4(
    num_groups: int, n: int, k: int, generator: torch.Generator, pairs: bool = False
) -> tuple[FourBits, Quantized]:
    """Every code, with scales as far apart as they may be; and the same numbers in FP8."""
    size = num_groups, n, k // 2
    data = torch.randint(0, 256, size, dtype=torch.uint8, device="cuda", generator=generator)
    scales = torch.randint(
        115,
        116 + MOST_SPREAD,
        (num_groups, n, k // 32),
        dtype=torch.uint8,
        device="cuda",
        generator=generator,
    )
    weights = FourBits(data, scales, WeightFormat.MXFP4)
    return weights, unpack_mxfp4(pack(weights, pairs), k)


def random_sizes(count: int, most: int, generator: torch.Generator) -> list[int]:
    """Rows of groups: the first has none and the last `most`."""
    some = torch.randint(0, most + 1, (count,), device="cuda", generator=generator).tolist()
    return [0, *some[2:], most] if count > 1 else [most]


def offsets_of(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("num_sms", [None, 1, 2, 7])
@pytest.mark.parametrize(("num_groups", "n", "k", "most"), SIZES)
@each_tile
def test_bits_are_those_of_fp8(
    config: tiles.TileConfig, num_groups: int, n: int, k: int, most: int, num_sms: int | None
) -> None:
    num_sms = None if num_sms is None else max(num_sms, config.cluster)
    generator, backend = fresh_generator("cuda"), planned(config)
    weights, fp8 = random_mxfp4(num_groups, n, k, generator)
    sizes = random_sizes(num_groups, most, generator)
    offsets, rows = offsets_of(sizes), sum(sizes)
    a = quantize_rows(random_rows((rows, k), generator))
    buffer, out = poisoned(rows, n, device="cuda")
    expected = poisoned(rows, n, device="cuda")[0]
    grouped_gemm_contiguous(a, fp8, offsets, out=expected[8:-8], backend="hopper")
    grouped_gemm_contiguous(a, weights, offsets, out=out, backend=backend, num_sms=num_sms)
    assert torch.equal(buffer.view(torch.int16), expected.view(torch.int16)), sizes

    a = quantize_rows(random_rows((num_groups, max(sizes), k), generator))
    counts = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    (buffer, out), (expected, of_fp8) = (poisoned(num_groups, max(sizes), n, device="cuda") for _ in range(2))
    grouped_gemm_masked(a, fp8, counts, out=of_fp8, backend="hopper")
    grouped_gemm_masked(a, weights, counts, out=out, backend=backend, num_sms=num_sms)
    assert torch.equal(buffer.view(torch.int16), expected.view(torch.int16)), sizes


def random_codes(
    weights: tuple[WeightFormat, int], num_groups: int, n: int, k: int, generator: torch.Generator
) -> FourBits:
    """Every code; INT4's scales of both signs, and all of NVFP4's that are numbers."""
    format, group = weights
    if format is WeightFormat.MXFP4:
        return random_mxfp4(num_groups, n, k, generator)[0]
    on: dict[str, Any] = {"device": "cuda", "generator": generator}
    data = torch.randint(0, 256, (num_groups, n, k // 2), dtype=torch.uint8, **on)
    if format is WeightFormat.INT4:
        dtype = torch.bfloat16 if group == 32 else torch.float16
        return FourBits(data, torch.randn(num_groups, n, k // group, **on).to(dtype), format)
    scales = torch.randint(0, 254, (num_groups, n, k // group), dtype=torch.uint8, **on)
    scales = torch.where(scales == 0x7F, 0x7E, scales).view(torch.float8_e4m3fn)
    return FourBits(data, scales, format, torch.rand(num_groups, n, **on) + 0.1)


def expected_products(a: Quantized, weights: FourBits, sizes: list[int]) -> Tensor:
    """float64 [M, N] of rows of all groups, one after another."""
    parts = zip(torch.split(dequantize_rows(*a).double(), sizes), groups_of(weights), strict=True)
    return torch.cat([rows @ decode(of_group).double().t() for rows, of_group in parts])


@pytest.mark.parametrize(("num_groups", "n", "k", "most"), SIZES)
@each_tile_of_all
def test_products_match_float64_with_the_same_bits_at_any_number_of_sms(
    weights: tuple[WeightFormat, int],
    config: tiles.TileConfig,
    num_groups: int,
    n: int,
    k: int,
    most: int,
) -> None:
    """Both layouts; and a row has the bits that it has alone."""
    generator, backend = fresh_generator("cuda"), planned(config)
    b = random_codes(weights, num_groups, n, k, generator)
    sizes = random_sizes(num_groups, most, generator)
    x = random_rows((sum(sizes), k), generator)
    a, offsets = quantize_rows(x), offsets_of(sizes)
    buffers = []
    for num_sms in (None, *(max(count, config.cluster) for count in (1, 2, 7))):
        buffer, out = poisoned(sum(sizes), n, device="cuda")
        grouped_gemm_contiguous(a, b, offsets, out=out, backend=backend, num_sms=num_sms)
        assert diff(out, expected_products(a, b, sizes)) < DEQUANTIZED_TOLERANCE, sizes
        buffers.append(buffer.view(torch.int16))
    assert all(torch.equal(buffer, buffers[0]) for buffer in buffers)

    max_m = max(sizes)
    rows = torch.full((num_groups, max_m, k), torch.nan, dtype=torch.bfloat16, device="cuda")
    for group, part in enumerate(torch.split(x, sizes)):
        rows[group, : len(part)] = part
    counts = torch.tensor(sizes, dtype=torch.int32, device="cuda")
    buffer, masked = poisoned(num_groups, max_m, n, device="cuda")
    grouped_gemm_masked(quantize_rows(rows), b, counts, out=masked, backend=backend)
    real = torch.cat([masked[group, :count] for group, count in enumerate(sizes)])
    assert torch.equal(real.view(torch.int16), out.view(torch.int16)), sizes
    assert all(untouched(masked[group, count:]) for group, count in enumerate(sizes))
    assert untouched(buffer[:8])
    assert untouched(buffer[-8:])

    last = num_groups - 1, sum(sizes) - 1  # one row alone, of the group with the most
    alone = mapped(b, lambda tensor: tensor[last[0] :])
    single = torch.empty(1, n, dtype=torch.bfloat16, device="cuda")
    grouped_gemm_contiguous(
        Quantized(a.data[last[1] :], a.scales[last[1] :]),
        alone,
        offsets_of([1]),
        out=single,
        backend="hopper",
    )
    assert torch.equal(single.view(torch.int16), out[last[1] :].view(torch.int16))


@pytest.mark.parametrize("first", range(1, 258, 32))
@each_tile_of_all
def test_every_height(weights: tuple[WeightFormat, int], config: tiles.TileConfig, first: int) -> None:
    heights, backend = list(range(first, min(first + 32, 258))), planned(config)
    case = random_contiguous(heights, 264, 256, "cuda", quantize=QUANTIZE[weights])
    buffer, out = poisoned(sum(heights), 264, device="cuda")
    grouped_gemm_contiguous(case.a, case.b, case.offsets, out=out, backend=backend)
    expect_contiguous(case, buffer, out)
    masked = random_masked(heights, max(heights), 136, 256, "cuda", quantize=QUANTIZE[weights])
    buffer, out = poisoned(len(heights), max(heights), 136, device="cuda")
    grouped_gemm_masked(masked.a, masked.b, masked.counts, out=out, backend=backend)
    expect_masked(masked, buffer, out)


@pytest.mark.parametrize("num_sms", [None, 2, 15])
@pytest.mark.parametrize("rows", [3, 70, 300])  # expected: of few and of many rows
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activated_bits_are_those_of_fp8(
    activation: Activation, biased: bool, rows: int, num_sms: int | None
) -> None:
    generator, gemm, on = fresh_generator("cuda"), GroupedGemm(Kernels()), current_stream(0)
    for num_groups, n, k in ((1, 128, 128), (5, 384, 640), (9, 256, 1024)):
        weights, fp8 = random_mxfp4(num_groups, 2 * n, k, generator, pairs=True)
        bias = (
            torch.randn((num_groups, 2 * n), device="cuda", generator=generator).bfloat16()
            if biased
            else None
        )
        sizes = random_sizes(num_groups, rows, generator)
        a, groups = quantize_rows(random_rows((sum(sizes), k), generator)), Groups(offsets_of(sizes))
        for expected_m in (1.0, 1000.0):
            expected = gemm.multiply_swiglu(on, a, fp8, groups, activation, expected_m, num_sms, bias)
            poison = [torch.full_like(expected.data.view(torch.uint8), 0x7F) for _ in range(8)]
            del poison
            got = gemm.multiply_swiglu(on, a, weights, groups, activation, expected_m, num_sms, bias)
            assert torch.equal(got.scales, expected.scales), sizes
            assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8)), sizes


def _layer(
    generator: torch.Generator, tokens: int, h: int, i: int, quantize: Quantize = quantize_mxfp4
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[FourBits, FourBits]]:
    num_groups, top_k = 6, 3
    sizes = (2 * i, h), (h, i)
    gate_up, down = (
        quantize(torch.randn(num_groups, n, k, device="cuda", generator=generator).mul_(k**-0.5))
        for n, k in sizes
    )
    x = torch.randn(tokens, h, device="cuda", generator=generator).bfloat16()
    ids = torch.rand(tokens, num_groups, device="cuda", generator=generator).argsort(1)[:, :top_k]
    weights = torch.rand(tokens, top_k, device="cuda", generator=generator)
    return (x, ids.to(torch.int32).contiguous(), weights), (gate_up, down)


@pytest.mark.parametrize("tokens", [1, 40, 700])
@pytest.mark.parametrize("h", [256, 2880])
@each_format
def test_experts_match_float64(weights: tuple[WeightFormat, int], tokens: int, h: int) -> None:
    generator, backend = fresh_generator("cuda"), HopperBackend()
    h = h // weights[1] * weights[1]
    operands, (gate_up, down) = _layer(generator, tokens, h, 384, QUANTIZE[weights])
    sizes = (6, 768), (6, h)
    biases = ExpertBiases(*(torch.randn(s, device="cuda", generator=generator).bfloat16() for s in sizes))
    cases: list[tuple[Activation, ExpertBiases | None]] = [
        (Swiglu(), None), (OtherGlu(1.702, 7.0, 1.0), biases)
    ]  # fmt: skip
    packed = backend.packed(gate_up, pairs=True), backend.packed(down)
    for rule, added in cases:
        options: dict[str, Any] = {"activation": rule, "biases": added, "backend": backend}
        out = fused_experts(*operands, gate_up, down, **options)
        assert diff(out, expected_experts(*operands, gate_up, down, rule, added)) < 2e-3
        assert torch.equal(fused_experts(*operands, *packed, **options), out)
        alone = fused_experts(*operands, *packed, num_sms=1, **options)  # in steps
        assert diff(alone, out.double()) < 2e-3


@each_format
def test_captured_calls_read_weights_that_were_replaced(weights: tuple[WeightFormat, int]) -> None:
    generator, backend = fresh_generator("cuda"), HopperBackend()
    operands, (gate_up, down) = _layer(generator, 5, 256, 128, QUANTIZE[weights])
    _, (other, _) = _layer(generator, 5, 256, 128, QUANTIZE[weights])
    before = fused_experts(*operands, gate_up, down, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_experts(*operands, gate_up, down, backend=backend)
    graph.replay()
    assert torch.equal(out, before)
    prepared = backend.prepare_weights(mapped(other, lambda tensor: tensor[2]), pairs=True)
    for target, source in zip(tensors_of(gate_up), tensors_of(other), strict=True):
        target[2] = source[2]
    backend.weights_changed(gate_up, [2], [prepared])
    graph.replay()
    assert torch.equal(out, fused_experts(*operands, gate_up, down, backend=HopperBackend()))
