"""The CPU's kernel against float64: every way of multiplying that this CPU has, into poisoned outputs."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from expertd.kernels import dequantize_blocks, grouped_gemm_contiguous, grouped_gemm_masked, quantize_blocks
from expertd.kernels.backends.cpu import backend as cpu
from expertd.kernels.backends.cpu.backend import CpuBackend, _Rows
from expertd.kernels.backends.cpu.instructions import Instructions
from expertd.kernels.backends.cpu.program import Program, instructions_here
from expertd.kernels.ops.quantize import Quantized
from tests.kernels.helpers import (
    diff,
    expect_contiguous,
    expect_masked,
    fresh_generator,
    poisoned,
    random_contiguous,
    random_masked,
    untouched,
)

HERE = instructions_here()
WAYS = {
    "tiles": replace(HERE, has_tiles=True),
    "pairs": replace(HERE, has_tiles=False),
    "16 lanes": Instructions(16, 32),
    "8 lanes": Instructions(8, 16),
    "4 lanes": Instructions(4, 16),
}


def _has(way: Instructions) -> bool:
    return (
        way.lanes <= HERE.lanes
        and way.has_bf16 <= HERE.has_bf16
        and way.has_tiles <= HERE.has_tiles
        and (way.lanes < 16 or way.registers == HERE.registers)
    )


@pytest.fixture(scope="module", params=WAYS)
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    """One that multiplies in one way."""
    way = WAYS[request.param]
    if not _has(way):
        pytest.skip(f"needs a CPU with {way}")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "program", lambda: Program(way))
        yield CpuBackend()
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("rows_per_group", "n", "k"),
    [
        ([1], 8, 128),
        ([64], 136, 256),
        ([0, 0, 5, 0], 576, 384),
        ([1, 3, 127, 2, 64, 65, 15, 16, 17, 31, 32, 33], 576, 256),
        ([0] * 20 + [300] + [1] * 11, 128, 128),
        ([1025, 0, 129], 1536, 768),  # more than one run, and more K than tiles sum up at once
    ],
)
def test_contiguous_matches_float64(rows_per_group: list[int], n: int, k: int, backend: CpuBackend) -> None:
    case = random_contiguous(rows_per_group, n, k)
    buffer, out = poisoned(sum(rows_per_group), n)
    grouped_gemm_contiguous(case.a, case.b, case.offsets, out=out, backend=backend)
    expect_contiguous(case, buffer, out)


@pytest.mark.parametrize(
    ("counts", "max_m", "n", "k"),
    [([1], 1, 8, 128), ([63, 0, 1, 62], 63, 136, 384), ([0] * 30 + [130, 7], 130, 256, 128)],
)
def test_masked_matches_float64(counts: list[int], max_m: int, n: int, k: int, backend: CpuBackend) -> None:
    case = random_masked(counts, max_m, n, k)
    buffer, out = poisoned(len(counts), max_m, n)
    grouped_gemm_masked(case.a, case.b, case.counts, out=out, backend=backend)
    expect_masked(case, buffer, out)


def test_masked_without_rows_writes_nothing(backend: CpuBackend) -> None:
    case = random_masked([0, 0], 4, 8, 128)
    buffer, out = poisoned(2, 4, 8)
    grouped_gemm_masked(case.a, case.b, case.counts, expected_m=3, out=out, backend=backend)
    assert untouched(buffer)


@pytest.mark.parametrize("num_rows", [1, 15, 16, 40])
def test_every_code_is_decoded_exactly(num_rows: int, backend: CpuBackend) -> None:
    """By ones in one column of K each; NaN stays where it is."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weights = Quantized(codes.repeat(2, 1).t().contiguous()[None].expand(1, 256, 2), torch.ones(1, 2, 1))
    data = torch.zeros(1, 256, 128, dtype=torch.float8_e4m3fn)
    data.view(torch.uint8)[..., 5] = weights.data[..., 0].view(torch.uint8)
    rows = torch.zeros(num_rows, 128).to(torch.float8_e4m3fn)
    rows[:, 5] = 1
    a = Quantized(rows, torch.ones(num_rows, 1))
    offsets = torch.tensor([0, num_rows], dtype=torch.int32)
    out = grouped_gemm_contiguous(a, Quantized(data, weights.scales), offsets, backend=backend)
    assert torch.equal(out.float().nan_to_num(1000), codes.float().nan_to_num(1000).expand(num_rows, 256))


def test_a_row_has_the_same_bits_in_every_batch(backend: CpuBackend) -> None:
    case = random_contiguous([77], 96, 640)
    together = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    for first, last in ((0, 1), (1, 4), (4, 13), (13, 28), (28, 44), (44, 77)):
        part = Quantized(case.a.data[first:last], case.a.scales[first:last])
        offsets = torch.tensor([0, last - first], dtype=torch.int32)
        assert torch.equal(
            grouped_gemm_contiguous(part, case.b, offsets, backend=backend), together[first:last]
        )


@pytest.mark.parametrize("num_rows", [2, 40])
def test_nan_stays_in_its_own_row(num_rows: int, backend: CpuBackend) -> None:
    case = random_contiguous([num_rows, 3], 64, 256)
    clean = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    case.a.scales[1] = torch.nan
    out = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    assert out[1].isnan().all()
    others = torch.arange(len(out)) != 1
    assert torch.equal(out[others], clean[others])


def test_modified_weights_are_used(backend: CpuBackend) -> None:
    case = random_contiguous([4, 4], 64, 128)
    before = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    case.b.scales.mul_(2)
    assert torch.equal(grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend), 2 * before)
    case.b.data.copy_(quantize_blocks(torch.zeros(2, 64, 128)).data)
    assert not grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend).any()


def test_weights_are_read_where_they_lie(backend: CpuBackend) -> None:
    """Also after changes that raise no version counter."""
    case = random_contiguous([3, 0, 40], 64, 256)
    packed = backend.packed(case.b)
    assert packed.data.data_ptr() == case.b.data.data_ptr()
    before = grouped_gemm_contiguous(case.a, packed, case.offsets, backend=backend)
    version = case.b.data._version
    case.b.data.data.view(torch.uint8)[2] ^= 0x80  # negates
    assert case.b.data._version == version
    after = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    assert torch.equal(after[:3], before[:3])
    assert torch.equal(after[3:], -before[3:])


@pytest.mark.parametrize("k", [144, 240, 272])
def test_a_last_block_of_k_may_be_short(k: int, backend: CpuBackend) -> None:
    """Then what lies behind it, the next row or group, is not used: every other one is NaN."""
    n, num_rows, generator = 72, 40, fresh_generator()
    data = torch.randn(2, n, k, generator=generator).to(torch.float8_e4m3fn)
    data.view(torch.uint8)[0, 1::2] = data.view(torch.uint8)[1] = 0x7F
    scales = torch.rand(2, 1, -(-k // 128), generator=generator) + 0.5
    rows = torch.randn(num_rows, k, generator=generator).bfloat16()
    out = torch.full((num_rows, n), 7, dtype=torch.bfloat16)
    everything = [_Rows(0, 0, num_rows)]
    backend._launch(backend._rows(rows), Quantized(data, scales), everything, None, out)
    expected = rows.double() @ dequantize_blocks(data[0], scales[0], torch.float64).t()
    assert out[:, 1::2].isnan().all()
    assert diff(out[:, ::2], expected[:, ::2]) < 1e-5


def test_weights_without_data_are_refused() -> None:
    case = random_contiguous([2], 64, 128)
    meta = Quantized(case.b.data.to("meta"), case.b.scales)
    with pytest.raises(ValueError, match="b device: expected cpu as a, got meta"):
        grouped_gemm_contiguous(case.a, meta, case.offsets, backend=CpuBackend())
