"""Tensor maps are made once per tensor, and freed with it."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from expertd.kernels.backends.hopper.tensor_maps import Rows, TensorMapCache


def e4m3(*shape: int) -> Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


def keep(rows: Rows, box_rows: int) -> tuple[Rows, int]:
    """Like cuda.core's tensor maps, the result keeps the memory alive."""
    return rows, box_rows


def seen(rows: Rows) -> Tensor:
    """The memory as another library reads it; host memory has the same interface under another name."""
    interface = SimpleNamespace(__array_interface__=rows.__cuda_array_interface__)
    return torch.from_numpy(np.asarray(interface))


@pytest.mark.parametrize(
    ("dtype", "seen_as"), [(torch.float8_e4m3fn, torch.uint8), (torch.bfloat16, torch.uint16)]
)
def test_rows_describe_the_tensors_memory(dtype: torch.dtype, seen_as: torch.dtype) -> None:
    data = torch.randn(6, 4, 128).to(dtype)[2:5]
    rows, _ = TensorMapCache(keep).get(data, 16)
    described = seen(rows)
    assert described.dtype == seen_as
    assert described.shape == (12, 128)
    assert described.data_ptr() == data.data_ptr()
    assert torch.equal(described, data.view(seen_as).view(12, 128))


def test_an_entry_is_dropped_with_its_tensor() -> None:
    cache, weights = TensorMapCache(keep), e4m3(8, 128)
    cache.get(weights, 128)
    for _ in range(3):
        cache.get(e4m3(4, 128), 16)
        gc.collect()
        assert len(cache) == 1


def test_memory_is_not_reused_while_it_is_described() -> None:
    """Tensors that are alive at the same time never share an entry, whatever the allocator does."""
    cache = TensorMapCache(keep)
    tensors = [e4m3(4, 128) for _ in range(20)]
    described = [seen(cache.get(tensor, 16)[0]) for tensor in tensors]
    assert len({data.data_ptr() for data in described}) == len(cache) == len(tensors)


def test_a_tensor_map_keeps_memory_alive_after_the_tensor() -> None:
    data = e4m3(4, 128)
    expected = data.view(torch.uint8).clone()
    rows, _ = TensorMapCache(keep).get(data, 16)
    del data
    gc.collect()
    others = [e4m3(4, 128) for _ in range(20)]
    assert torch.equal(seen(rows), expected)
    assert all(other.data_ptr() != seen(rows).data_ptr() for other in others)


@pytest.mark.gpu
def test_a_server_keeps_no_activations() -> None:
    from expertd.kernels import grouped_gemm_contiguous
    from tests.kernels.helpers import random_contiguous

    case = random_contiguous([300, 200], 256, 512, "cuda")

    def call() -> None:
        fresh = case.a._replace(data=case.a.data.clone())
        grouped_gemm_contiguous(fresh, case.b, case.offsets, backend="hopper")

    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(200):
        call()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
