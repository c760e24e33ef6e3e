"""Energy, power and clock of a GPU from the driver's management library (NVML), without a package for it."""

import ctypes
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch

_SM_CLOCK = 1  # NVML_CLOCK_SM
_NOT_SUPPORTED = 3  # NVML_ERROR_NOT_SUPPORTED


@dataclass(frozen=True)
class Sample:
    """One reading.

    seconds  of time.perf_counter
    joules   used since the driver was loaded; None if the GPU has no such counter
    watts    the sensor's, an average over up to a second
    mhz      of the SMs
    """

    seconds: float
    joules: float | None
    watts: float
    mhz: float


class Sensor(Protocol):
    """What can be sampled."""

    def read(self) -> Sample: ...


class Nvml:
    """The sensor of torch's current GPU. Raises RuntimeError if the library refuses, OSError without it."""

    def __init__(self, library: ctypes.CDLL | None = None, uuid: str | None = None) -> None:
        self._library = library or ctypes.CDLL("libnvidia-ml.so.1")
        _check(self._library.nvmlInit_v2(), "nvmlInit")
        self._device = ctypes.c_void_p()
        name = uuid or f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        found = self._library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(self._device))
        _check(found, "nvmlDeviceGetHandleByUUID")

    def read(self) -> Sample:
        """One reading of everything."""
        milliwatts, mhz = ctypes.c_uint(), ctypes.c_uint()
        now, joules = time.perf_counter(), self._joules()
        status = self._library.nvmlDeviceGetPowerUsage(self._device, ctypes.byref(milliwatts))
        _check(status, "nvmlDeviceGetPowerUsage")
        status = self._library.nvmlDeviceGetClockInfo(self._device, _SM_CLOCK, ctypes.byref(mhz))
        _check(status, "nvmlDeviceGetClockInfo")
        return Sample(now, joules, milliwatts.value / 1e3, mhz.value)

    def _joules(self) -> float | None:
        millijoules = ctypes.c_ulonglong()
        status = self._library.nvmlDeviceGetTotalEnergyConsumption(self._device, ctypes.byref(millijoules))
        if status == _NOT_SUPPORTED:
            return None
        _check(status, "nvmlDeviceGetTotalEnergyConsumption")
        return millijoules.value / 1e3


def mean_watts(samples: list[Sample]) -> float:
    """From the energy counter, between its first and last change; without a counter, the sensor's mean.

    The counter moves some ten times a second, so a change is where both its value and the time are known.
    Raises ValueError if there are no two changes.
    """
    if any(sample.joules is None for sample in samples):
        return sum(sample.watts for sample in samples) / len(samples)
    changes = [
        (after.seconds, after.joules)
        for before, after in pairwise(samples)
        if after.joules is not None and after.joules != before.joules
    ]
    if len(changes) < 2:
        raise ValueError(f"energy counter: expected 2 changes, got {len(changes)} in {len(samples)} samples")
    (begin, first), (end, last) = changes[0], changes[-1]
    return (last - first) / (end - begin)


def _check(status: int, name: str) -> None:
    if status:
        raise RuntimeError(f"{name}: expected status 0, got {status}")
