"""The reference backend against float64, on fresh random data, into poisoned outputs."""

import gc
import weakref

import pytest
import torch

from expertd.kernels import (
    Quantized,
    dequantize_blocks,
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    quantize_blocks,
)
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.kernels.backends.reference.matrices import Matrices
from tests.kernels.helpers import (
    diff,
    expect_contiguous,
    expect_masked,
    poisoned,
    random_contiguous,
    random_masked,
    untouched,
)

CONTIGUOUS = [
    ([1], 8, 128),
    ([64], 136, 256),
    ([0, 0, 5, 0], 576, 384),
    ([1, 3, 127, 2, 64, 65], 576, 256),  # every start but the first is odd, or not a multiple of a tile
    ([0] * 20 + [300] + [1] * 11, 128, 128),
    ([257, 0, 129], 1536, 512),
]

MASKED = [
    ([1], 1, 8, 128),
    ([0, 1, 0], 1, 576, 256),
    ([63, 0, 1, 62], 63, 136, 384),
    ([65, 64, 1, 0], 65, 8, 512),
    ([0] * 30 + [130, 7], 130, 256, 128),
]


@pytest.mark.parametrize(("rows_per_group", "n", "k"), CONTIGUOUS)
def test_contiguous_matches_float64(rows_per_group: list[int], n: int, k: int) -> None:
    case = random_contiguous(rows_per_group, n, k)
    buffer, out = poisoned(sum(rows_per_group), n)
    grouped_gemm_contiguous(case.a, case.b, case.offsets, out=out, backend=ReferenceBackend())
    expect_contiguous(case, buffer, out)


@pytest.mark.parametrize(("counts", "max_m", "n", "k"), MASKED)
def test_masked_matches_float64(counts: list[int], max_m: int, n: int, k: int) -> None:
    case = random_masked(counts, max_m, n, k)
    buffer, out = poisoned(len(counts), max_m, n)
    grouped_gemm_masked(case.a, case.b, case.counts, out=out, backend=ReferenceBackend())
    expect_masked(case, buffer, out)


def test_masked_without_rows_writes_nothing() -> None:
    case = random_masked([0, 0], 4, 8, 128)
    buffer, out = poisoned(2, 4, 8)
    grouped_gemm_masked(case.a, case.b, case.counts, expected_m=3, out=out, backend="reference")
    assert untouched(buffer)


def test_row_major_scales_give_the_same_bits() -> None:
    case = random_contiguous([3, 4], 64, 256)
    column_major = grouped_gemm_contiguous(case.a, case.b, case.offsets)
    row_major = grouped_gemm_contiguous(
        case.a._replace(scales=case.a.scales.contiguous()), case.b, case.offsets
    )
    assert torch.equal(column_major, row_major)


def test_nan_stays_in_its_own_row() -> None:
    case = random_contiguous([2, 3], 64, 256)
    clean = grouped_gemm_contiguous(case.a, case.b, case.offsets)
    case.a.scales[1] = torch.nan
    out = grouped_gemm_contiguous(case.a, case.b, case.offsets)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2, 3, 4]], clean[[0, 2, 3, 4]])


def test_modified_weights_are_dequantized_again() -> None:
    backend = ReferenceBackend()
    case = random_contiguous([4, 4], 64, 128)
    before = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    case.b.scales.mul_(2)
    doubled = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    assert diff(doubled, 2 * before) < 1e-12
    case.b.data.copy_(quantize_blocks(torch.zeros(2, 64, 128)).data)
    assert not grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend).any()


def _plain(matrices: Matrices) -> torch.Tensor:
    """[G, N, K], whatever layout the matrices have."""
    return torch.stack([m.to_dense() if m.is_mkldnn else m for m in matrices])


def test_weights_are_dequantized_once_and_freed_with_the_callers() -> None:
    backend = ReferenceBackend()
    b, b_scales = quantize_blocks(torch.ones(2, 64, 128))
    kept = backend._weights.get(Quantized(b, b_scales))
    assert backend._weights.get(Quantized(b, b_scales)) is kept
    other = b_scales * 2
    while other._version < b_scales._version:
        other.add_(0)
    assert torch.equal(_plain(backend._weights.get(Quantized(b, other))), 2 * _plain(kept))
    kept = backend._weights.get(Quantized(b, b_scales))
    assert torch.equal(_plain(kept), dequantize_blocks(b, b_scales, torch.bfloat16))
    watched = weakref.ref(kept[0])
    del b, kept
    gc.collect()
    assert watched() is None


def test_only_groups_that_changed_are_dequantized_again() -> None:
    backend = ReferenceBackend()
    weights = quantize_blocks(torch.ones(3, 64, 128))
    before = backend._weights.get(weights)
    other = quantize_blocks(torch.full((64, 128), -0.5))
    weights.data[1], weights.scales[1] = other
    backend.weights_changed(weights, [1], [backend.prepare_weights(other)])
    after = backend._weights.get(weights)
    assert [new is old for new, old in zip(after, before, strict=True)] == [True, False, True]
    assert torch.equal(_plain(after), dequantize_blocks(*weights, torch.bfloat16))
    backend.weights_changed(quantize_blocks(torch.ones(1, 64, 128)), [], [])  # never seen: nothing to do


def test_weights_made_in_inference_mode_work() -> None:
    with torch.inference_mode():
        case = random_contiguous([4, 0], 64, 128)
        buffer, out = poisoned(4, 64)
        grouped_gemm_contiguous(case.a, case.b, case.offsets, out=out)
    expect_contiguous(case, buffer, out)


def test_packed_weights_give_the_same_bits_without_their_data() -> None:
    case, backend = random_contiguous([3, 0, 40], 64, 256), ReferenceBackend()
    before = grouped_gemm_contiguous(case.a, case.b, case.offsets, backend=backend)
    data = case.b.data.clone()
    watched, packed = weakref.ref(data), backend.packed(case.b._replace(data=data))
    del data
    gc.collect()
    assert watched() is None
    assert packed.data.is_meta
    assert torch.equal(grouped_gemm_contiguous(case.a, packed, case.offsets, backend=backend), before)
    with torch.inference_mode():
        assert torch.equal(grouped_gemm_contiguous(case.a, packed, case.offsets, backend=backend), before)
    others = packed._replace(data=torch.empty_like(packed.data))
    with pytest.raises(ValueError, match="device: expected cpu, or those of `packed`, got meta"):
        grouped_gemm_contiguous(case.a, others, case.offsets, backend=backend)
