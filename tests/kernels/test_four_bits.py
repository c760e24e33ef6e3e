"""Weights of four bits: their codes, and the reference backend with them against float64."""

import re
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd.backends import BACKENDS, Capabilities
from expertd.kernels import (
    FourBits,
    WeightFormat,
    decode,
    fused_experts,
    fused_experts_in_parts,
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    quantize_rows,
)
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.kernels.checks import check_format
from expertd.kernels.ops.activation import SILU
from expertd.kernels.ops.four_bits import (
    codes_of,
    mapped,
    packed_codes,
    quantize_int4,
    quantize_mxfp4,
    quantize_nvfp4,
    tensors_of,
)
from expertd.kernels.ops.parts import ExpertPart
from tests.kernels.helpers import (
    diff,
    expect_contiguous,
    expect_masked,
    expected_experts,
    fresh_generator,
    poisoned,
    random_contiguous,
    random_masked,
    random_weights,
)
from tests.kernels.test_fused_experts import BF16_TOLERANCE, FP8_TOLERANCE, Composed

Quantize = Callable[[Tensor], FourBits]
QUANTIZE: dict[str, Quantize] = {
    "MXFP4": quantize_mxfp4,
    "INT4 of 32": quantize_int4,
    "INT4 of 128": partial(quantize_int4, group_size=128),
    "INT4 with scales of fp32": partial(quantize_int4, dtype=torch.float32),
    "NVFP4": quantize_nvfp4,
}
each_format = pytest.mark.parametrize("quantize", QUANTIZE.values(), ids=QUANTIZE.keys())
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _value(weights: FourBits, row: int, column: int) -> float:
    """A number of weights [N, K], bit by bit, in Python's float64."""
    byte = int(weights.data[row, column // 2])
    code = byte >> 4 if column % 2 else byte & 15
    bits = weights.scales[row, column // weights.group_size]
    scale = 2.0 ** (int(bits) - 127) if weights.format is WeightFormat.MXFP4 else float(bits)
    if weights.format is WeightFormat.INT4:
        value = float(code - 16 if code >= 8 else code)
    else:
        value = -E2M1[code - 8] if code >= 8 else E2M1[code]
    return value * scale * (1.0 if weights.whole is None else float(weights.whole[row]))


@each_format
def test_each_value_is_the_code_times_its_scales(quantize: Quantize) -> None:
    generator = fresh_generator()
    weights = quantize(torch.randn(3, 256, generator=generator))
    weights.data.copy_(torch.randint(0, 256, weights.data.shape, dtype=torch.uint8, generator=generator))
    decoded = decode(weights)
    expected = [[_value(weights, row, column) for column in range(256)] for row in range(3)]
    assert torch.equal(decoded, torch.tensor(expected, dtype=torch.float64).float())
    assert torch.equal(decode(mapped(weights, lambda tensor: tensor[None]))[0], decoded)


def test_every_exponent_of_mxfp4_is_exact() -> None:  # with the last two, 6 is infinite in float32
    codes = torch.arange(16, dtype=torch.uint8).repeat(253, 2)
    scales = torch.arange(253, dtype=torch.uint8)[:, None]
    decoded = decode(FourBits(packed_codes(codes), scales, WeightFormat.MXFP4))
    signed = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64).repeat(2)
    assert torch.equal(decoded.double(), signed * torch.exp2(scales.double() - 127))


@each_format
def test_what_is_decoded_is_quantized_to_the_same_values(quantize: Quantize) -> None:
    once = decode(quantize(random_weights(2, 24, 256, fresh_generator())))
    assert diff(decode(quantize(once)), once) < 1e-5


@each_format
def test_rounding_takes_the_nearest_code(quantize: Quantize) -> None:
    w = random_weights(1, 16, 128, fresh_generator())[0]
    weights = quantize(w)
    chosen = (decode(weights) - w.float()).abs()
    for code in range(16):
        other = decode(weights._replace(data=torch.full_like(weights.data, code * 17)))
        assert ((other - w.float()).abs() >= chosen * (1 - 1e-6)).all()


def test_ties_go_to_even_codes() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    row = torch.cat([middles, -middles, torch.tensor([4.0]), torch.zeros(17)])[None]  # the scale is 1
    codes = codes_of(quantize_mxfp4(row).data)[0]
    assert codes[:7].tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert codes[7:14].tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_codes_come_back_from_bytes() -> None:
    codes = torch.randint(0, 16, (5, 64), dtype=torch.uint8, generator=fresh_generator())
    data = packed_codes(codes)
    assert data[2, 3] == codes[2, 6] + 16 * codes[2, 7]
    assert torch.equal(codes_of(data), codes)


@each_format
@pytest.mark.parametrize(
    ("rows_per_group", "n", "k"), [([1], 8, 128), ([0, 5, 0, 65], 136, 384), ([257, 0, 129], 576, 256)]
)
def test_contiguous_matches_float64(quantize: Quantize, rows_per_group: list[int], n: int, k: int) -> None:
    case = random_contiguous(rows_per_group, n, k, quantize=quantize)
    buffer, out = poisoned(sum(rows_per_group), n)
    grouped_gemm_contiguous(case.a, case.b, case.offsets, out=out, backend=ReferenceBackend())
    expect_contiguous(case, buffer, out)


@each_format
@pytest.mark.parametrize(("counts", "max_m", "n", "k"), [([1], 1, 8, 128), ([65, 0, 64, 1], 65, 136, 256)])
def test_masked_matches_float64(quantize: Quantize, counts: list[int], max_m: int, n: int, k: int) -> None:
    case = random_masked(counts, max_m, n, k, quantize=quantize)
    buffer, out = poisoned(len(counts), max_m, n)
    grouped_gemm_masked(case.a, case.b, case.counts, out=out, backend=ReferenceBackend())
    expect_masked(case, buffer, out)


def _experts(
    quantize: Quantize, num_groups: int, h: int, i: int, generator: torch.Generator
) -> tuple[FourBits, FourBits]:
    sizes = (2 * i, h), (h, i)
    gate_up, down = (torch.randn(num_groups, n, k, generator=generator).mul_(k**-0.5) for n, k in sizes)
    return quantize(gate_up), quantize(down)


@each_format
@pytest.mark.parametrize(("tokens", "h"), [(1, 256), (40, 384)])
def test_experts_match_float64(quantize: Quantize, tokens: int, h: int) -> None:
    generator = fresh_generator()
    gate_up, down = _experts(quantize, 4, h, 256, generator)
    x = torch.randn(tokens, h, generator=generator).to(torch.bfloat16)
    ids = torch.rand(tokens, 4, generator=generator).argsort(1)[:, :2].to(torch.int32)
    weights = torch.rand(tokens, 2, generator=generator)
    backend = ReferenceBackend()
    out = fused_experts(x, ids, weights, gate_up, down, backend=backend)
    expected = expected_experts(x, ids, weights, gate_up, down, SILU, None)
    assert diff(out, expected) < BF16_TOLERANCE
    halves = [slice(0, 1), slice(1, 4)]
    parts = [ExpertPart(mapped(gate_up, take), mapped(down, take)) for take in map(itemgetter, halves)]
    assert torch.equal(fused_experts_in_parts(x, ids, weights, parts, 4, backend=backend), out)
    packed = backend.packed(gate_up), backend.packed(down)
    assert packed[0].data.is_meta
    assert torch.equal(fused_experts(x, ids, weights, *packed, backend=backend), out)


def test_hidden_sizes_that_are_no_multiple_of_128() -> None:
    generator = fresh_generator()
    gate_up, down = _experts(quantize_mxfp4, 3, 160, 128, generator)
    x = torch.randn(9, 160, generator=generator).to(torch.bfloat16)
    ids = torch.randint(0, 3, (9, 1), dtype=torch.int32, generator=generator)
    weights = torch.ones(9, 1)
    out = fused_experts(x, ids, weights, gate_up, down, backend=ReferenceBackend())
    assert diff(out, expected_experts(x, ids, weights, gate_up, down, SILU, None)) < BF16_TOLERANCE
    in_steps = fused_experts(x, ids, weights, gate_up, down, backend=Composed())  # as on a GPU, in FP8
    assert diff(in_steps, out) < FP8_TOLERANCE


def test_changed_scales_are_noticed() -> None:
    case, backend = random_contiguous([4, 4], 64, 128, quantize=quantize_nvfp4), ReferenceBackend()
    before = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    tensors_of(case.b)[2].mul_(2)
    after = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    assert torch.equal(after, 2 * before)


def _refused(weights: object, capabilities: Capabilities, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        check_format(capabilities, "b", weights)


def test_a_backend_refuses_formats_that_it_lacks() -> None:
    weights, only_fp8 = quantize_mxfp4(torch.ones(1, 8, 128)), Capabilities()
    takers = " or ".join(name for name, can in BACKENDS.items() if WeightFormat.MXFP4 in can.weight_formats)
    _refused(weights, only_fp8, f"b format: expected FP8, got MXFP4, which backend {takers} takes")
    wrong = weights._replace(format=WeightFormat.FP8)
    _refused(wrong, only_fp8, "b format: expected one of four bits for FourBits, got FP8")
    _refused((1, 2), only_fp8, "b: expected Quantized(data, scales) or FourBits, got tuple")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": torch.zeros(1, 8, 64, dtype=torch.int8)}, "b dtype: expected torch.uint8, got torch.int8"),
        (
            {"scales": torch.zeros(1, 8, 8, dtype=torch.uint8)},
            "b scales columns: expected one for 32 of 128 columns, got 8",
        ),
        (
            {"scales": torch.zeros(1, 7, 4, dtype=torch.uint8)},
            "b scales shape: expected (1, 8, 4), got (1, 7, 4)",
        ),
        ({"scales": torch.zeros(1, 8, 4)}, "b scales dtype: expected torch.uint8, got torch.float32"),
        ({"whole": torch.ones(1, 8)}, "b whole: expected None for MXFP4, got a tensor"),
        (
            {"scales": torch.ones(1, 8, 8).to(torch.float8_e4m3fn), "format": WeightFormat.NVFP4},
            "b whole: expected fp32 [G, N], got None",
        ),
        (
            {
                "scales": torch.ones(1, 8, 8).to(torch.float8_e4m3fn),
                "format": WeightFormat.NVFP4,
                "whole": torch.ones(1, 1),
            },
            "b whole shape: expected (1, 8), got (1, 1)",
        ),
        (
            {"scales": torch.ones(1, 8, 2, dtype=torch.bfloat16), "format": WeightFormat.INT4},
            "b scales columns: expected one for 32 or 128 of 128 columns, got 2",
        ),
        (
            {"data": torch.zeros(513, dtype=torch.uint8)[1:].view(1, 8, 64)},
            "b address: expected a multiple of 16 bytes, got 1 bytes past one",
        ),
    ],
)
def test_wrong_tensors_are_refused(change: dict[str, Any], message: str) -> None:
    a, offsets = quantize_rows(torch.ones(2, 128)), torch.tensor([0, 2], dtype=torch.int32)
    weights = quantize_mxfp4(torch.ones(1, 8, 128))
    grouped_gemm_contiguous(a, weights, offsets, backend="reference")
    with pytest.raises(ValueError, match=re.escape(message)):
        grouped_gemm_contiguous(a, weights._replace(**change), offsets, backend="reference")


def test_experts_need_whole_groups_of_columns() -> None:
    gate_up, down = _experts(quantize_nvfp4, 1, 144, 128, fresh_generator())
    routing = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    with pytest.raises(ValueError, match="gate_up K: expected a multiple of 32 for NVFP4, got 144"):
        fused_experts(torch.ones(2, 144), *routing, gate_up, down, backend="reference")
