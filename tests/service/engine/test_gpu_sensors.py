"""Power, clocks and throttling, from an NVML that a test gives."""

import sys
from collections.abc import Sequence

import pynvml
import pytest

from expertd.service.engine.metrics.device import REASONS, GpuSensors
from tests.service.engine.fake_nvml import fake_nvml


def values(uuids: Sequence[str]) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("expertd_gpu_"), *sample.labels.values()): sample.value
        for metric in GpuSensors().metrics(uuids)
        for sample in metric.samples
    }


def test_values_are_in_base_units(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml(monkeypatch)
    expected: dict[tuple[str, ...], object] = {
        ("power_watts", "1"): 650.5,
        ("power_limit_watts", "1"): 700.0,
        ("energy_joules_total", "1"): 12.5,
        ("sm_clock_hertz", "1"): 1755e6,
        ("memory_clock_hertz", "1"): 3201e6,
        ("temperature_celsius", "1"): 61,
        ("busy_ratio", "1"): 0.98,
        ("peak_flops", "1"): pytest.approx(132 * 8192 * 1.98e9),
        ("peak_bytes_per_second", "1"): pytest.approx(4916.736e9),
        **{("throttled", "1", reason): float(reason == "power_cap") for reason in REASONS},
    }
    assert values(["GPU-b", "GPU-a", ""]) == expected


def test_what_a_gpu_does_not_support_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(gpu: str) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    fake_nvml(monkeypatch, DeviceGetTotalEnergyConsumption=refuse, DeviceGetUtilizationRates=refuse)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda gpu: (8, 0))
    names = {name for name, *_ in values(["GPU-a"])}
    assert "power_watts" in names
    assert not names & {"energy_joules_total", "busy_ratio", "peak_flops"}


@pytest.mark.parametrize("is_installed", [True, False])
def test_without_a_driver_or_the_package_there_is_nothing(
    is_installed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    fake_nvml(monkeypatch, Init=fail)
    if not is_installed:
        monkeypatch.setitem(sys.modules, "pynvml", None)
    caplog.set_level("INFO")
    sensors = GpuSensors()
    assert [*sensors.metrics(["GPU-a"]), *sensors.metrics(["GPU-a"])] == []
    assert caplog.text.count("no metrics of power and clocks") == 1


@pytest.mark.parametrize("uuids", [(), ("",), ("", "")], ids=str)  # those of ranks on a CPU are empty
def test_a_server_without_gpus_does_not_ask(
    uuids: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    caplog.set_level("INFO")
    assert list(GpuSensors().metrics(uuids)) == []
    assert caplog.messages == []
