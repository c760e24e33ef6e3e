"""Quantization on a GPU: the same bits as on a CPU, and no wait for the device."""

import pytest
import torch

from expertd.kernels import Quantized, dequantize_blocks, dequantize_rows, quantize_blocks, quantize_rows
from tests.kernels.helpers import forbid_host_sync, fresh_generator, random_rows

pytestmark = pytest.mark.gpu


def _expect_equal(there: Quantized, here: Quantized) -> None:
    assert torch.equal(there.data.cpu().view(torch.uint8), here.data.view(torch.uint8))
    assert torch.equal(there.scales.cpu(), here.scales)
    assert there.scales.stride() == here.scales.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 128), (70, 1024), (3, 5, 256)])
def test_rows_have_the_cpus_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = random_rows(shape, fresh_generator()).to(dtype)
    x[..., 0, :] = 0
    x.view(-1)[-1] = 1e-44
    there, here = quantize_rows(x.cuda()), quantize_rows(x)
    _expect_equal(there, here)
    assert torch.equal(dequantize_rows(*there).cpu(), dequantize_rows(*here))


@pytest.mark.parametrize("shape", [(1, 128), (300, 513), (3, 200, 256)])
def test_blocks_have_the_cpus_bits(shape: tuple[int, ...]) -> None:
    w = torch.randn(shape, generator=fresh_generator())
    there, here = quantize_blocks(w.cuda()), quantize_blocks(w)
    _expect_equal(there, here)
    assert torch.equal(dequantize_blocks(*there).cpu(), dequantize_blocks(*here))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_infinity_stay_in_their_own_row(bad: float) -> None:
    x = random_rows((7, 256), fresh_generator("cuda"))
    x[3, 17] = bad
    back = dequantize_rows(*quantize_rows(x))
    assert back[3].isnan().any()
    assert back[[0, 1, 2, 4, 5, 6]].isfinite().all()


def test_nothing_waits_for_the_device() -> None:
    x = random_rows((70, 1024), fresh_generator("cuda"))
    with forbid_host_sync():
        dequantize_rows(*quantize_rows(x))
        dequantize_blocks(*quantize_blocks(x))
