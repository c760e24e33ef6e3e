"""The metrics of devices: what steps use of them, the calls that they answer by themselves, and power, clocks
and temperature of GPUs by NVML.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple
from typing import Any

from prometheus_client.core import Metric

from expertd.device_calls import CallCounts
from expertd.service.engine.metrics.family import MetricFamily, samples
from expertd.service.moe.step.step_counts import Launches, StepUse, StoreCounts

_ONE = "with one rank"
STEPS = MetricFamily(
    "counter",
    "steps",
    "steps, those at start-up included; launch: graph (a CUDA graph for their number of tokens), recurring "
    "(a CUDA graph of a step with the same memory), eager (launch by launch), host (on a CPU)",
    "steps",
    ("model", "launch"),
    when=_ONE,
)
COPY_SECONDS = MetricFamily(
    "counter",
    "host_copy_seconds",
    "time in which the host copied between requests and the memory of steps",
    "seconds",
    when=_ONE,
)
COPY_BYTES = MetricFamily("counter", "host_copy_bytes", "bytes of these copies", "bytes", when=_ONE)
WEIGHTS = MetricFamily(
    "gauge",
    "weights_bytes",
    "bytes of the model's weights on the device, in FP8; of backend reference in bf16. 0: not loaded",
    "bytes",
    ("model",),
    when=_ONE,
)
MEMORY = MetricFamily(
    "gauge",
    "device_memory_bytes",
    "memory in use by owner: weights, staging (rows of steps), workspace (graphs and temporary tensors), "
    "outside (CUDA itself, and other processes)",
    "bytes",
    ("owner",),
    needs_gpu=True,
    when=_ONE,
)
MEMORY_USED = MetricFamily(
    "gauge", "device_memory_used_bytes", "memory in use", "bytes", needs_gpu=True, when=_ONE
)
MEMORY_TOTAL = MetricFamily(
    "gauge", "device_memory_total_bytes", "total memory", "bytes", needs_gpu=True, when=_ONE
)


def _of_store(name: str, text: str, unit: str) -> MetricFamily:
    when = "with `weights_budget`, if it is smaller than the experts"
    return MetricFamily("counter", f"expert_store_{name}", text, unit, ("model",), when=when)


_STORE_FAMILIES = (  # in the order of `StoreCounts`
    _of_store("hits", "experts with tokens in a step that were on the device", "experts"),
    _of_store("misses", "experts with tokens in a step that were copied from the host's memory", "experts"),
    _of_store("copy_bytes", "bytes of these copies", "bytes"),
    _of_store("wait_seconds", "time in which the device waited for these copies", "seconds"),
)


def _of_calls(name: str, text: str, unit: str) -> MetricFamily:
    when = "with one rank and no lanes"
    return MetricFamily("counter", f"device_call{name}", text, unit, ("model",), needs_gpu=True, when=when)


_CALL_FAMILIES = (  # in the order of `CallCounts`
    _of_calls("s", "device calls with an output; `expertd_requests_total` has none of them", "calls"),
    _of_calls("_tokens", "tokens of device calls; `expertd_tokens_total` has none of them", "tokens"),
    _of_calls("_steps", "steps of device calls; `expertd_steps_total` has none of them", "steps"),
    _of_calls("_seconds", "time in these steps; `expertd_compute_seconds` has none of it", "seconds"),
)


def use_metrics(models: Sequence[str], use: StepUse) -> Iterator[Metric]:
    """The metrics of `use`; a model that is not loaded has 0."""
    launches = {model: asdict(use.launches.get(model, Launches())) for model in models}
    of_launch = {(model, launch): n for model, each in launches.items() for launch, n in each.items()}
    yield from samples(STEPS, of_launch)
    yield COPY_SECONDS.counter(use.copies.seconds)
    yield COPY_BYTES.counter(use.copies.num_bytes)
    yield from samples(WEIGHTS, {model: use.weights.get(model, 0) for model in models})
    if use.memory is not None:
        yield from samples(MEMORY, use.memory)


def store_metrics(stores: Mapping[str, StoreCounts]) -> Iterator[Metric]:
    """The metrics of stores of experts, of all ranks together; none without a store."""
    if stores:
        rows = {model: astuple(counts) for model, counts in stores.items()}
        for index, family in enumerate(_STORE_FAMILIES):
            yield from samples(family, {model: row[index] for model, row in rows.items()})


def memory_metrics(memory: tuple[int, int] | None) -> Iterator[Metric]:
    """Metrics of (used, total) bytes of the device; none without a GPU."""
    if memory is not None:
        yield MEMORY_USED.gauge(memory[0])
        yield MEMORY_TOTAL.gauge(memory[1])


def call_metrics(models: Sequence[str], counts: Mapping[str, CallCounts]) -> Iterator[Metric]:
    """The metrics of device calls; a model without any has 0."""
    rows = {model: counts.get(model, CallCounts()) for model in models}
    for index, family in enumerate(_CALL_FAMILIES):
        yield from samples(family, {model: row[index] for model, row in rows.items()})


logger = logging.getLogger(__name__)

_WHEN = "with nvidia-ml-py; gpu: the rank, or 0"
_LABELS = ("gpu",)
_FLOPS_PER_CLOCK = 8192  # dense FP8 operations of a Hopper SM
_CORES_PER_SM = 128
_HOPPER = 9


def _gauge(name: str, text: str, unit: str) -> MetricFamily:
    return MetricFamily("gauge", f"gpu_{name}", text, unit, _LABELS, needs_gpu=True, when=_WHEN)


POWER = _gauge("power_watts", "power that the GPU draws", "watts")
POWER_LIMIT = _gauge("power_limit_watts", "power above which it lowers its clocks", "watts")
ENERGY = MetricFamily(
    "counter",
    "gpu_energy_joules",
    "energy since the driver was loaded",
    "joules",
    _LABELS,
    needs_gpu=True,
    when=_WHEN,
)
SM_CLOCK = _gauge("sm_clock_hertz", "clock of the SMs", "hertz")
MEMORY_CLOCK = _gauge("memory_clock_hertz", "clock of the memory", "hertz")
TEMPERATURE = _gauge("temperature_celsius", "temperature of the GPU", "celsius")
BUSY = _gauge(
    "busy_ratio", "part of the driver's last sampling period in which a kernel of any process ran", "ratio"
)
THROTTLED = MetricFamily(
    "gauge",
    "gpu_throttled",
    "1 while this holds the clocks down; reason: as NVML names them, such as power_cap, hardware_slowdown, "
    "hardware_thermal, software_thermal",
    "",
    ("gpu", "reason"),
    needs_gpu=True,
    when=_WHEN,
)
PEAK_FLOPS = _gauge(
    "peak_flops",
    "ceiling of dense FP8 on Hopper at its highest clock: SMs x 8192 operations x clock",
    "operations per second",
)
PEAK_BYTES = _gauge(
    "peak_bytes_per_second",
    "ceiling of the memory at its highest clock: bus width x clock x 2",
    "bytes per second",
)
FAMILIES = (
    STEPS, COPY_SECONDS, COPY_BYTES, WEIGHTS, *_STORE_FAMILIES, MEMORY, MEMORY_USED, MEMORY_TOTAL,
    *_CALL_FAMILIES,
    POWER, POWER_LIMIT, ENERGY, SM_CLOCK, MEMORY_CLOCK, TEMPERATURE, BUSY, THROTTLED, PEAK_FLOPS, PEAK_BYTES,
)  # fmt: skip
# By the names of NVML, without their prefix nvmlClocksEventReason. Idle is none.
REASONS = {
    "application_clocks": "ApplicationsClocksSetting",
    "display_clocks": "DisplayClockSetting",
    "hardware_power_brake": "HwPowerBrakeSlowdown",
    "hardware_slowdown": "HwSlowdown",
    "hardware_thermal": "HwThermalSlowdown",
    "power_cap": "SwPowerCap",
    "software_thermal": "SwThermalSlowdown",
    "sync_boost": "SyncBoost",
}


class GpuSensors:
    """Reads GPUs at each scrape. What a GPU does not support has no series."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: dict[str, Any] = {}
        self._is_missing = False

    def metrics(self, uuids: Sequence[str]) -> Iterator[Metric]:
        """The metrics of the GPUs with these UUIDs; their numbers here are the label `gpu`.

        Those that this node does not have are left out, and ranks without a GPU, whose UUID is empty.
        """
        if not any(uuids) or not self._start():
            return
        found = [(str(number), self._find(uuid)) for number, uuid in enumerate(uuids) if uuid]
        gpus = [(number, handle) for number, handle in found if handle is not None]
        nvml, milli, mega = self._nvml, 1e-3, 1e6
        for family, read in (
            (POWER, lambda gpu: milli * nvml.nvmlDeviceGetPowerUsage(gpu)),
            (POWER_LIMIT, lambda gpu: milli * nvml.nvmlDeviceGetEnforcedPowerLimit(gpu)),
            (ENERGY, lambda gpu: milli * nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)),
            (SM_CLOCK, lambda gpu: mega * nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
            (MEMORY_CLOCK, lambda gpu: mega * nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
            (TEMPERATURE, lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
            (BUSY, lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100),
            (PEAK_FLOPS, self._peak_flops),
            (PEAK_BYTES, self._peak_bytes),
        ):
            yield self._family(family, gpus, read)
        yield self._throttled(gpus)

    def _start(self) -> bool:
        """Whether the library is there; says once why it is not."""
        if self._nvml is None and not self._is_missing:
            try:
                import pynvml

                pynvml.nvmlInit()
            except Exception as error:  # no package, or no driver
                self._is_missing = True
                logger.info("no metrics of power and clocks: expected nvidia-ml-py and NVML, got %s", error)
            else:
                self._nvml = pynvml
        return self._nvml is not None

    def _find(self, uuid: str) -> Any:
        if uuid not in self._handles:
            self._handles[uuid] = None
            with suppress(self._nvml.NVMLError):
                self._handles[uuid] = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        return self._handles[uuid]

    def _family(
        self, family: MetricFamily, gpus: Sequence[tuple[str, Any]], read: Callable[[Any], float | None]
    ) -> Metric:
        metric = family.counter() if family.kind == "counter" else family.gauge()
        for label, handle in gpus:
            with suppress(self._nvml.NVMLError):
                if (value := read(handle)) is not None:
                    metric.add_metric([label], value)
        return metric

    def _throttled(self, gpus: Sequence[tuple[str, Any]]) -> Metric:
        nvml, throttled = self._nvml, THROTTLED.gauge()
        for label, handle in gpus:
            with suppress(nvml.NVMLError):
                now = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
                for reason, name in REASONS.items():
                    bit = getattr(nvml, f"nvmlClocksEventReason{name}")
                    throttled.add_metric([label, reason], bool(now & bit))
        return throttled

    def _peak_flops(self, gpu: Any) -> float | None:
        if self._nvml.nvmlDeviceGetCudaComputeCapability(gpu)[0] != _HOPPER:
            return None
        sms = self._nvml.nvmlDeviceGetNumGpuCores(gpu) / _CORES_PER_SM
        clock = 1e6 * self._nvml.nvmlDeviceGetMaxClockInfo(gpu, self._nvml.NVML_CLOCK_SM)
        return float(sms * _FLOPS_PER_CLOCK * clock)

    def _peak_bytes(self, gpu: Any) -> float:
        clock = 1e6 * self._nvml.nvmlDeviceGetMaxClockInfo(gpu, self._nvml.NVML_CLOCK_MEM)
        return float(self._nvml.nvmlDeviceGetMemoryBusWidth(gpu) / 8 * 2 * clock)
