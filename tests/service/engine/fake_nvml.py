"""NVML with one GPU, GPU-a, in the place of the driver's; its functions are those of nvidia-ml-py."""

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

MHZ_SM, MHZ_MEMORY = 1980, 3201


def fake_nvml(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """An H200, with these functions (without the prefix nvml) in the place of others."""

    def find(uuid: str) -> str:
        if uuid != "GPU-a":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return uuid

    def clock(gpu: str, which: int) -> int:
        return {pynvml.NVML_CLOCK_SM: 1755, pynvml.NVML_CLOCK_MEM: 3201}[which]

    def most(gpu: str, which: int) -> int:
        return {pynvml.NVML_CLOCK_SM: MHZ_SM, pynvml.NVML_CLOCK_MEM: MHZ_MEMORY}[which]

    reasons = pynvml.nvmlClocksEventReasonSwPowerCap | pynvml.nvmlClocksEventReasonGpuIdle
    functions: dict[str, Any] = {
        "Init": lambda: None,
        "DeviceGetHandleByUUID": find,
        "DeviceGetPowerUsage": lambda gpu: 650_500,
        "DeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
        "DeviceGetTotalEnergyConsumption": lambda gpu: 12_500,
        "DeviceGetClockInfo": clock,
        "DeviceGetMaxClockInfo": most,
        "DeviceGetTemperature": lambda gpu, sensor: 61,
        "DeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=98, memory=40),
        "DeviceGetCurrentClocksEventReasons": lambda gpu: reasons,
        "DeviceGetCudaComputeCapability": lambda gpu: (9, 0),
        "DeviceGetNumGpuCores": lambda gpu: 132 * 128,
        "DeviceGetMemoryBusWidth": lambda gpu: 6144,
        **changes,
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", function)
