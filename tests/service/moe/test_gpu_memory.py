"""The free memory of GPUs by CUDA's numbers, without a context on them."""

import os
import subprocess
import sys
from types import SimpleNamespace
from uuid import UUID

import pynvml
import pytest
import torch

from expertd.service.device import gpu_memory
from expertd.service.device.gpu_memory import free_gpu_bytes
from tests.service.engine.fake_nvml import fake_nvml

WHOLE, PART = UUID(int=1), UUID(int=2)
FREE = {f"GPU-{WHOLE}": 140_000_000_000, f"MIG-{PART}": 17_000_000_000}

_IN_A_PROCESS = """
from cuda.bindings import driver
from expertd.service.device.gpu_memory import free_gpu_bytes
free = free_gpu_bytes([0, 1])
is_active = driver.cuDevicePrimaryCtxGetState(driver.cuDeviceGet(0)[1])[2]
print(free[0], free[1], is_active)
"""


def test_each_number_is_the_gpu_that_cuda_means(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> str:
        if name not in FREE:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return name

    ends = []
    fake_nvml(
        monkeypatch,
        DeviceGetHandleByUUID=find,
        DeviceGetMemoryInfo=lambda gpu: SimpleNamespace(free=FREE[gpu]),
        Shutdown=lambda: ends.append(1),
    )
    # As CUDA_VISIBLE_DEVICES orders them: a part of a GPU (MIG), a whole one, and one that NVML lacks.
    monkeypatch.setattr(gpu_memory, "_uuids", lambda: [PART, WHOLE, UUID(int=3)])
    assert free_gpu_bytes([1, 0, 2, 3]) == [140_000_000_000, 17_000_000_000, None, None]
    assert ends == [1]


def test_nothing_is_known_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    fake_nvml(monkeypatch, Init=fail)
    monkeypatch.setattr(gpu_memory, "_uuids", lambda: [WHOLE])
    assert free_gpu_bytes([0, 1]) == [None, None]


@pytest.mark.gpu
@pytest.mark.parametrize("by_uuid", [False, True])
def test_asking_makes_no_context(by_uuid: bool) -> None:
    visible = f"GPU-{torch.cuda.get_device_properties(0).uuid}" if by_uuid else "0"
    result = subprocess.run(
        [sys.executable, "-c", _IN_A_PROCESS],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": visible},
        capture_output=True,
        text=True,
        check=True,
    )
    free, other, is_active = result.stdout.split()
    assert (other, is_active) == ("None", "0")
    assert abs(int(free) - torch.cuda.mem_get_info(0)[0]) < 2_000_000_000
