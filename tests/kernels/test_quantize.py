"""Quantization: exactness of scales, hostile values, ragged blocks, strides and errors."""

from collections.abc import Callable

import pytest
import torch

from expertd.kernels import dequantize_blocks, dequantize_rows, expand_rows, quantize_blocks, quantize_rows
from tests.kernels.helpers import diff, fresh_generator, random_rows

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def _block_scales(w: torch.Tensor) -> torch.Tensor:
    """The scales of quantize_blocks, computed by two plain loops."""
    n, k = w.shape
    rows = [
        torch.stack([w[i : i + 128, j : j + 128].float().abs().max() for j in range(0, k, 128)])
        for i in range(0, n, 128)
    ]
    return torch.stack(rows) / 448


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_scale_is_the_blocks_largest_magnitude_over_448(dtype: torch.dtype) -> None:
    x = random_rows((37, 384), fresh_generator()).to(dtype)
    data, scales = quantize_rows(x)
    assert data.dtype == torch.float8_e4m3fn
    assert data.is_contiguous()
    torch.testing.assert_close(scales, x.view(37, 3, 128).float().abs().amax(-1) / 448, rtol=2**-23, atol=0)
    expected = (x.view(37, 3, 128).float() / scales[..., None]).to(torch.float8_e4m3fn).view(37, 384)
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))


def test_rows_round_trip_error_is_that_of_three_mantissa_bits() -> None:
    x = random_rows((64, 1024), fresh_generator())
    data, scales = quantize_rows(x)
    back = dequantize_rows(data, scales)
    assert diff(back, x) < 5e-4
    relative = (back - x.float()).abs() / x.float().abs().clamp(min=1e-2)
    assert relative.max().item() <= 2**-4


@pytest.mark.parametrize("shape", [(5, 256), (1, 256), (5, 128), (0, 256)])
def test_rows_scales_are_column_major(shape: tuple[int, int]) -> None:
    scales = quantize_rows(torch.ones(shape)).scales
    assert scales.shape == (shape[0], shape[1] // 128)
    assert scales.stride() == (1, max(shape[0], 1))


def test_rows_of_three_dimensions_are_column_major_in_each_group() -> None:
    x = random_rows((3, 5, 256), fresh_generator())
    data, scales = quantize_rows(x)
    assert scales.stride() == (10, 1, 5)
    for group in range(3):
        alone = quantize_rows(x[group])
        assert torch.equal(data[group].view(torch.uint8), alone.data.view(torch.uint8))
        assert torch.equal(scales[group], alone.scales)


def test_rows_of_one_dimension() -> None:
    data, scales = quantize_rows(torch.full((256,), -3.0))
    assert scales.shape == (2,)
    torch.testing.assert_close(dequantize_rows(data, scales), torch.full((256,), -3.0))


def test_rows_of_a_strided_input_equal_those_of_its_copy() -> None:
    x = torch.randn(256, 48, generator=fresh_generator()).t()
    data, scales = quantize_rows(x)
    expected = quantize_rows(x.contiguous())
    assert data.is_contiguous()
    assert torch.equal(data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(scales, expected.scales)


@pytest.mark.parametrize("dtype", FLOATS)
def test_zero_blocks_give_zeros_and_a_positive_finite_scale(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 256, dtype=dtype)
    x[1, 130] = 1
    for data, scales in (quantize_rows(x), quantize_blocks(x)):
        assert scales.isfinite().all()
        assert (scales > 0).all()
        assert torch.equal(data.float() != 0, x != 0)


def test_tiny_values_never_overflow_through_their_scale() -> None:
    x = torch.full((1, 128), 1e-44)
    data, scales = quantize_rows(x)
    assert data.float().isfinite().all()
    assert scales.item() > 0
    assert dequantize_rows(data, scales).max().item() <= 1e-43


def test_huge_values_stay_finite() -> None:
    x = torch.full((1, 128), torch.finfo(torch.float32).max)
    back = dequantize_rows(*quantize_rows(x))
    assert back.isfinite().all()
    assert diff(back / 1e30, x / 1e30) < 1e-6


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_stay_in_their_own_row(bad: float) -> None:
    x = random_rows((7, 256), fresh_generator())
    clean = quantize_rows(x)
    x[3, 17] = bad
    data, scales = quantize_rows(x)
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(data[others].view(torch.uint8), clean.data[others].view(torch.uint8))
    assert torch.equal(scales[others], clean.scales[others])
    assert dequantize_rows(data, scales)[3].isnan().any()


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (1, 128), (129, 200), (8, 100), (300, 513)])
def test_blocks_scales_and_round_trip(shape: tuple[int, int]) -> None:
    w = torch.randn(shape, generator=fresh_generator())
    data, scales = quantize_blocks(w)
    assert data.shape == w.shape
    assert data.is_contiguous()
    assert scales.is_contiguous()
    torch.testing.assert_close(scales, _block_scales(w), rtol=2**-23, atol=0)
    assert diff(dequantize_blocks(data, scales), w) < 5e-4


def test_blocks_of_three_dimensions_are_those_of_each_group() -> None:
    w = torch.randn(3, 200, 256, generator=fresh_generator()).to(torch.bfloat16)
    data, scales = quantize_blocks(w)
    assert scales.shape == (3, 2, 2)
    back = dequantize_blocks(data, scales, torch.bfloat16)
    for group in range(3):
        alone = quantize_blocks(w[group])
        assert torch.equal(data[group].view(torch.uint8), alone.data.view(torch.uint8))
        assert torch.equal(scales[group], alone.scales)
        assert torch.equal(back[group], dequantize_blocks(*alone).to(torch.bfloat16))


def test_dequantizing_is_exact_for_every_code() -> None:
    data = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    finite = data.float().nan_to_num(0).to(torch.float8_e4m3fn)
    for codes in (data, finite):  # NaN takes a different path on a CPU
        back = dequantize_rows(codes, torch.full((2, 1), 0.5))
        torch.testing.assert_close(back, codes.float() / 2, rtol=0, atol=0, equal_nan=True)


ONES, CODES = torch.ones(2, 1), quantize_rows(torch.ones(4, 256)).data
FLOAT, CODE = "expected float32, bfloat16 or float16, got", "data dtype: expected torch.float8_e4m3fn, got"
REFUSED = [
    *((quantize_rows, [torch.zeros(shape)], r"multiple of 128, got") for shape in ((4, 100), (4, 130), ())),
    *(
        (quantize, [torch.zeros(128, 128).to(dtype)], FLOAT)
        for quantize in (quantize_rows, quantize_blocks)
        for dtype in (torch.int32, torch.float64, torch.float8_e4m3fn)
    ),
    *(
        (quantize_blocks, [torch.zeros(shape)], r"expected .* got")
        for shape in ((128,), (1, 2, 128, 128), (0, 128), (2, 0, 128))
    ),
    (dequantize_rows, [CODES, torch.ones(4, 1)], r"expected \(4, 2\), got \(4, 1\)"),
    (dequantize_blocks, [CODES, torch.ones(4, 2)], r"expected \(1, 2\), got \(4, 2\)"),
    (dequantize_rows, [torch.ones(2, 130).to(torch.float8_e4m3fn), ONES], "multiple of 128"),
    *(
        (dequantize, [torch.ones(2, 128).to(dtype), ONES], CODE)
        for dequantize in (dequantize_rows, dequantize_blocks)
        for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.float8_e5m2)
    ),
]


@pytest.mark.parametrize(("call", "arguments", "message"), REFUSED)
def test_other_shapes_and_dtypes_are_refused(
    call: Callable[..., object], arguments: list[torch.Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(*arguments)


def test_parameters_are_quantized_without_their_gradient() -> None:
    weight = torch.nn.Parameter(torch.randn(128, 128))
    for quantize in (quantize_rows, quantize_blocks):
        assert torch.equal(
            quantize(weight).data.view(torch.uint8), quantize(weight.data).data.view(torch.uint8)
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("magnitude", [1e-2, 1.0, 1e3])
def test_expanded_rows_are_quantized_to_the_same_bits(dtype: torch.dtype, magnitude: float) -> None:
    """As dequantized ones are not: multiplying by 448 and by 1/448 rounds twice."""
    x = (random_rows((512, 1024), fresh_generator()) * magnitude).to(dtype)
    x[3, 128:256] = 0
    quantized = quantize_rows(x)
    again = quantize_rows(expand_rows(*quantized))
    assert torch.equal(again.data.view(torch.uint8), quantized.data.view(torch.uint8))
    assert torch.equal(again.scales, quantized.scales)
    plain = quantize_rows(dequantize_rows(*quantized))
    assert not torch.equal(plain.scales, quantized.scales)
    for extreme in (1e-36, 1e-30, 1e30):
        quantized = quantize_rows(random_rows((64, 1024), fresh_generator()) * extreme)
        again = quantize_rows(expand_rows(*quantized))
        assert torch.equal(again.data.view(torch.uint8), quantized.data.view(torch.uint8))
        assert torch.equal(again.scales, quantized.scales)


def test_expanded_rows_are_the_values() -> None:
    quantized = quantize_rows(random_rows((64, 256), fresh_generator()))
    torch.testing.assert_close(expand_rows(*quantized), dequantize_rows(*quantized), rtol=3e-7, atol=0)
    signs = quantized.data.float().sign()
    assert torch.equal(expand_rows(*quantized).sign(), signs)
    # Scales that quantize_rows would not choose: no value is 448, or they are powers of two.
    data = torch.full((1, 128), 3.5).to(torch.float8_e4m3fn)
    assert torch.equal(expand_rows(data, torch.tensor([[0.25]])), torch.full((1, 128), 0.875))
    data[0, 0] = 448
    assert expand_rows(data, torch.tensor([[0.25]]))[0, :2].tolist() == [112.0, 0.875]


def test_expanded_rows_keep_nan_to_themselves() -> None:
    x = torch.ones(2, 128)
    x[0, 5] = torch.nan
    rows = expand_rows(*quantize_rows(x))
    assert rows[0].isnan().all()
    assert torch.equal(rows[1], torch.ones(128))
