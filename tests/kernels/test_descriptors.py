"""Descriptors are made once a tensor and go with it, memory and all."""

import gc

import pytest
import torch
from torch import Tensor

from kernels.descriptors import DescriptorCache


def e4m3(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def keep(data: Tensor, box_rows: int) -> tuple[Tensor, int]:
    """Like cuda.core's, what is made holds on to its memory."""
    return data, box_rows


def test_a_tensor_is_described_once_for_each_box() -> None:
    cache, data = DescriptorCache(keep), e4m3(4, 128)
    first = cache.get(data, 16)
    assert cache.get(data, 16) is first
    assert cache.get(data, 64) is not first
    assert len(cache) == 2


def test_what_is_described_is_the_same_memory_as_rows_of_bytes() -> None:
    data = e4m3(6, 4, 128)[2:5]
    described, _ = DescriptorCache(keep).get(data, 16)
    assert described.shape == (12, 128)
    assert described.data_ptr() == data.data_ptr()
    assert torch.equal(described, data.view(torch.uint8).view(12, 128))


def test_an_entry_goes_with_its_tensor() -> None:
    cache, weights = DescriptorCache(keep), e4m3(8, 128)
    cache.get(weights, 128)
    for _ in range(50):
        cache.get(e4m3(4, 128), 16)
        gc.collect()
        assert len(cache) == 1


def test_memory_is_not_reused_while_it_is_described() -> None:
    """Two tensors alive at once never share an entry, whatever the allocator does."""
    cache = DescriptorCache(keep)
    tensors = [e4m3(4, 128) for _ in range(20)]
    described = [cache.get(tensor, 16)[0] for tensor in tensors]
    assert len({data.data_ptr() for data in described}) == len(cache) == len(tensors)


@pytest.mark.gpu
def test_a_server_keeps_no_activations() -> None:
    from kernels import grouped_gemm_contiguous
    from tests.kernels.helpers import random_contiguous

    case = random_contiguous([300, 200], 256, 512, "cuda")

    def call() -> None:
        fresh = case.a.data.clone()
        grouped_gemm_contiguous(fresh, case.a.scales, *case.b, case.offsets, backend="hopper")

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        call()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
