"""Every metric of the server; each application has its own registry."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from expertd.service.engine.metrics.family import MetricFamily, samples
from expertd.service.engine.metrics.ranks import RankState, rank_metrics
from expertd.service.engine.metrics.requests import (
    KeyCounts,
    RequestCounts,
    RequestTotals,
    StageSeconds,
    StatusOf,
    key_metrics,
    request_metrics,
    request_totals,
)
from expertd.service.engine.metrics.steps import ModelStatistics, StepMetrics, StepTotals
from expertd.service.engine.refusals import ConnectionReason, Reason
from expertd.service.moe.request import StepResult
from expertd.service.moe.shape import LayerShape

_RANKS_TOO = "0 with ranks: see `expertd_rank_jit_*`"
BUILD = MetricFamily("info", "build", "always 1; backend and device are empty until they are known", "",
               ("version", "backend", "device"))  # fmt: skip
READY = MetricFamily(
    "gauge",
    "model_ready",
    "1 when the model is ready, else 0; no series for one that is unloaded by `load: false` or a call",
    "",
    ("model",),
)
COMPILATIONS = MetricFamily("counter", "jit_compilations", f"kernels compiled; {_RANKS_TOO}", "kernels")
COMPILE_SECONDS = MetricFamily(
    "counter", "jit_compile_seconds", f"time spent compiling kernels; {_RANKS_TOO}", "seconds"
)
CACHE_HITS = MetricFamily(
    "counter", "jit_cache_hits", f"compiled kernels found in the cache; {_RANKS_TOO}", "kernels"
)
DEVICE_SMS = MetricFamily("gauge", "device_sms", "SMs of the device", "SMs", needs_gpu=True)
PARTITION_SMS = MetricFamily(
    "gauge", "partition_sms", "SMs of a partition", "SMs", ("partition",), needs_gpu=True
)
REGIONS = MetricFamily(
    "gauge", "shared_memory_regions", "callers' regions; kind: system or cuda", "regions", ("kind",)
)
REGION_BYTES = MetricFamily("gauge", "shared_memory_bytes", "bytes of callers' regions", "bytes", ("kind",))
BUFFERED = MetricFamily(
    "gauge",
    "buffered_bytes",
    "bytes of large bodies and outputs (not gRPC's messages), of `limits.max_buffered_bytes`; process: "
    "`engine`, or the number of an HTTP process",
    "bytes",
    ("process",),
)
CHANNELS = MetricFamily("gauge", "channels", "open channels", "channels")
CHANNEL_BYTES = MetricFamily("gauge", "channel_bytes", "bytes of channels' data regions", "bytes")
FAMILIES = (
    BUILD, READY, COMPILATIONS, COMPILE_SECONDS, CACHE_HITS, DEVICE_SMS, PARTITION_SMS, REGIONS, REGION_BYTES,
    BUFFERED, CHANNELS, CHANNEL_BYTES,
)  # fmt: skip


class JitCounts(Protocol):
    """The result of `expertd.kernels.jit.stats()`."""

    @property
    def compilations(self) -> int: ...
    @property
    def compile_seconds(self) -> float: ...
    @property
    def cache_hits(self) -> int: ...


class _Callback(Collector):
    """Calls a function at every scrape."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class Metrics:
    """Records requests and steps; the other metrics are read when Prometheus scrapes."""

    def __init__(self, version: str, status_of: StatusOf = lambda reason: reason or "ok") -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # no `_created` series for each counter
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._build = {"version": version, "backend": "", "device": ""}
        self.requests = RequestCounts([])  # of this process
        self._request_cells: list[memoryview[float]] = []  # of others
        self.keys = KeyCounts()  # of this process
        self._key_cells: list[memoryview[float]] = []  # of others
        self._buffered: dict[str, Callable[[], float]] = {}
        self._steps = StepMetrics({}, 0)
        self.watch(lambda: [BUILD.info(self._build)])
        self.watch(lambda: self._steps.collect())
        self.watch(lambda: request_metrics(self.requests.models, self._all_cells, status_of))
        self.watch(lambda: key_metrics([self.keys.cells, *self._key_cells]))
        self.watch(lambda: samples(BUFFERED, {process: used() for process, used in self._buffered.items()}))

    def add_models(
        self, shapes: Mapping[str, LayerShape], max_expert_series: int, lanes: Sequence[str] = ()
    ) -> None:
        """Start every series of these models at 0, because rates need a first value; see `StepMetrics`."""
        self.requests = RequestCounts(shapes)
        self._steps = StepMetrics(shapes, max_expert_series, lanes)

    def add_process(self, requests: "memoryview[float]", keys: "memoryview[float]") -> None:
        """Include what another process counts with `RequestCounts` of the same models, and `KeyCounts`."""
        self._request_cells.append(requests)
        self._key_cells.append(keys)

    def set_backend(self, backend: str, device: str) -> None:
        """Report the backend and device that were chosen at start-up."""
        self._build = {**self._build, "backend": backend, "device": device}

    def request_done(
        self, model: str, reason: Reason | None, seconds: float, stages: StageSeconds | None = None
    ) -> None:
        """Count an answered infer request; see `RequestCounts.request_done`."""
        self.requests.request_done(model, reason, seconds, stages)

    def connection_refused(self, reason: ConnectionReason) -> None:
        """Count input that a connection refused, before the application received a request."""
        self.requests.connection_refused(reason)

    def step_done(
        self, model: str, result: StepResult, queue_seconds: Sequence[float], lane: str = ""
    ) -> None:
        """Count a step of `lane` whose requests had waited `queue_seconds`."""
        self._steps.add(model, result, queue_seconds, lane)

    def step_failed(self, model: str, num_requests: int) -> None:
        """Count a step that raised."""
        self._steps.failed(model)

    def statistics(self) -> dict[str, ModelStatistics]:
        """The statistics of every served model, by name."""
        requests = self.request_totals()
        return {
            model: ModelStatistics(sums, requests[model].success, requests[model].failure)
            for model, sums in self._steps.sums().items()
        }

    def request_totals(self) -> dict[str, RequestTotals]:
        """The requests to every served model, and those to others under ""."""
        return request_totals(self.requests.models, self._all_cells)

    def step_totals(self) -> dict[str, StepTotals]:
        """The steps of every served model."""
        return self._steps.totals()

    def watch(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Report the result of `collect` at each scrape."""
        self.registry.register(_Callback(collect))

    def watch_models(self, ready: Callable[[], Mapping[str, bool]]) -> None:
        """Report the result of `ready` at each scrape: model, if not unloaded -> whether it is ready."""
        self.watch(lambda: samples(READY, ready()))

    def watch_jit(self, stats: Callable[[], JitCounts]) -> None:
        """Report the kernel compiler's statistics at each scrape."""

        def collect() -> Iterator[Metric]:
            now = stats()
            yield COMPILATIONS.counter(now.compilations)
            yield COMPILE_SECONDS.counter(now.compile_seconds)
            yield CACHE_HITS.counter(now.cache_hits)

        self.watch(collect)

    def watch_partitions(self, sizes: Callable[[], tuple[int, Mapping[str, int]] | None]) -> None:
        """Report SMs at each scrape: (SMs of the device, partition -> granted SMs), None without a GPU."""

        def collect() -> Iterator[Metric]:
            now = sizes()
            if now is not None:
                yield DEVICE_SMS.gauge(now[0])
                yield from samples(PARTITION_SMS, now[1])

        self.watch(collect)

    def watch_shared_memory(self, totals: Callable[[], Mapping[str, tuple[int, int]]]) -> None:
        """Report callers' shared memory at each scrape: kind -> (regions, bytes)."""

        def collect() -> Iterator[Metric]:
            now = totals()
            yield from samples(REGIONS, {kind: regions for kind, (regions, _) in now.items()})
            yield from samples(REGION_BYTES, {kind: num_bytes for kind, (_, num_bytes) in now.items()})

        self.watch(collect)

    def watch_buffered(self, process: str, used: Callable[[], float]) -> None:
        """Report the bytes that a process uses of `limits.max_buffered_bytes` at each scrape."""
        self._buffered[process] = used

    def watch_ranks(self, states: Callable[[], Sequence[RankState]]) -> None:
        """Report the result of `states` at each scrape: the state of each rank, if there are ranks."""
        self.watch(lambda: rank_metrics(states()))

    def watch_channels(self, totals: Callable[[], tuple[int, int]]) -> None:
        """Report (open channels, bytes of their data regions) at each scrape."""

        def collect() -> Iterator[Metric]:
            channels, num_bytes = totals()
            yield CHANNELS.gauge(channels)
            yield CHANNEL_BYTES.gauge(num_bytes)

        self.watch(collect)

    @property
    def _all_cells(self) -> "list[memoryview[float]]":
        return [self.requests.cells, *self._request_cells]
