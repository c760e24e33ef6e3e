"""MXFP4 weights on Hopper: the bits of FP8 kernels with the same numbers, and float64; outputs poisoned."""

import itertools
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
    fused_experts,
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    quantize_rows,
)
from expertd.kernels.backends.hopper import tiles
from expertd.kernels.backends.hopper.backend import HopperBackend
from expertd.kernels.backends.hopper.grouped_gemm import GroupedGemm, Groups
from expertd.kernels.backends.hopper.launch import Kernels
from expertd.kernels.backends.hopper.packed_weights import MOST_SPREAD, pack_mxfp4, unpack_mxfp4
from expertd.kernels.backends.hopper.plans import GemmPlan
from expertd.kernels.backends.streams import current_stream
from expertd.kernels.ops.activation import Activation
from expertd.kernels.ops.four_bits import mapped, quantize_mxfp4
from tests.kernels.helpers import (
    diff,
    expect_contiguous,
    expect_masked,
    expected_experts,
    fresh_generator,
    poisoned,
    random_contiguous,
    random_masked,
    random_rows,
)

pytestmark = pytest.mark.gpu
each_tile = pytest.mark.parametrize("config", tiles.MXFP4_CONFIGS, ids=lambda config: config.name)
SIZES = [(1, 128, 128, 5), (5, 256, 640, 40), (4, 576, 384, 150), (33, 264, 1024, 100), (7, 1160, 2816, 300)]
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
    return weights, unpack_mxfp4(pack_mxfp4(weights, pairs), k)


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


@pytest.mark.parametrize("first", range(1, 258, 32))
@each_tile
def test_every_height(config: tiles.TileConfig, first: int) -> None:
    heights, backend = list(range(first, min(first + 32, 258))), planned(config)
    case = random_contiguous(heights, 264, 256, "cuda", quantize=quantize_mxfp4)
    buffer, out = poisoned(sum(heights), 264, device="cuda")
    grouped_gemm_contiguous(case.a, case.b, case.offsets, out=out, backend=backend)
    expect_contiguous(case, buffer, out)
    masked = random_masked(heights, max(heights), 136, 256, "cuda", quantize=quantize_mxfp4)
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
    generator: torch.Generator, tokens: int, h: int, i: int
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[FourBits, FourBits]]:
    num_groups, top_k = 6, 3
    sizes = (2 * i, h), (h, i)
    gate_up, down = (
        quantize_mxfp4(torch.randn(num_groups, n, k, device="cuda", generator=generator).mul_(k**-0.5))
        for n, k in sizes
    )
    x = torch.randn(tokens, h, device="cuda", generator=generator).bfloat16()
    ids = torch.rand(tokens, num_groups, device="cuda", generator=generator).argsort(1)[:, :top_k]
    weights = torch.rand(tokens, top_k, device="cuda", generator=generator)
    return (x, ids.to(torch.int32).contiguous(), weights), (gate_up, down)


@pytest.mark.parametrize("tokens", [1, 40, 700])
@pytest.mark.parametrize("h", [256, 2880])
def test_experts_match_float64(tokens: int, h: int) -> None:
    generator, backend = fresh_generator("cuda"), HopperBackend()
    operands, (gate_up, down) = _layer(generator, tokens, h, 384)
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


def test_captured_calls_read_weights_that_were_replaced() -> None:
    generator, backend = fresh_generator("cuda"), HopperBackend()
    operands, (gate_up, down) = _layer(generator, 5, 256, 128)
    _, (other, _) = _layer(generator, 5, 256, 128)
    before = fused_experts(*operands, gate_up, down, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_experts(*operands, gate_up, down, backend=backend)
    graph.replay()
    assert torch.equal(out, before)
    prepared = backend.prepare_weights(mapped(other, lambda tensor: tensor[2]), pairs=True)
    for target, source in ((gate_up.data, other.data), (gate_up.scales, other.scales)):
        target[2] = source[2]
    backend.weights_changed(gate_up, [2], [prepared])
    graph.replay()
    assert torch.equal(out, fused_experts(*operands, gate_up, down, backend=HopperBackend()))
