"""What is known of each rank, and the metrics that say it; imports no torch."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_GAUGES = (
    ("rank_up", "1 when the rank is ready"),
    ("rank_device_memory_used_bytes", "Memory in use on the rank's device"),
    ("rank_device_memory_total_bytes", "Total memory of the rank's device"),
)
_COUNTERS = (
    ("rank_starts", "Starts of the rank"),
    ("rank_compute_seconds", "Time in steps"),
    ("rank_expert_tokens", "Tokens computed by the rank's experts"),
    ("rank_jit_compilations", "Kernels compiled by the rank's present process"),
    ("rank_jit_compile_seconds", "Time that the rank's present process spent compiling kernels"),
    ("rank_jit_cache_hits", "Compiled kernels that the rank's present process found in the cache"),
)


class RankDevice(NamedTuple):
    """A rank's device and kernels, as its process says from time to time.

    memory        (used, total) bytes; None for a CPU
    compilations  of kernels, with their compile_seconds and cache_hits, since the process started
    """

    memory: tuple[int, int] | None = None
    compilations: int = 0
    compile_seconds: float = 0.0
    cache_hits: int = 0


class RankState(NamedTuple):
    """A rank: whether it is ready; its starts, seconds in steps and experts' tokens so far; its device."""

    is_up: bool
    starts: int
    compute_seconds: float
    expert_tokens: int
    device: RankDevice = RankDevice()


def rank_metrics(states: Sequence[RankState]) -> Iterator[Metric]:
    """The metrics of all ranks; none without ranks."""
    if not states:
        return
    gauges = [GaugeMetricFamily(f"expertd_{name}", text, labels=["rank"]) for name, text in _GAUGES]
    counters = [CounterMetricFamily(f"expertd_{name}", text, labels=["rank"]) for name, text in _COUNTERS]
    for rank, (is_up, starts, seconds, tokens, device) in enumerate(states):
        of_gauges = (is_up, *(device.memory or (None, None)))
        of_counters = (starts, seconds, tokens, *device[1:])
        for gauge, level in zip(gauges, of_gauges, strict=True):
            if level is not None:
                gauge.add_metric([str(rank)], level)
        for counter, total in zip(counters, of_counters, strict=True):
            counter.add_metric([str(rank)], total)
    yield from (metric for metric in (*gauges, *counters) if metric.samples)
