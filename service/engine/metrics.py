"""Every metric of the server; each application has its own registry."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import GaugeMetricFamily, Metric

from expertd.layout import Layout
from expertd.service.engine.collectors import CallbackCollector, ExpertTokens, count
from expertd.service.engine.key_counts import KeyCounts, key_metrics
from expertd.service.engine.rank_metrics import RankState, rank_metrics
from expertd.service.engine.refusals import Reason
from expertd.service.engine.request_counts import SECONDS, RequestCounts, request_metrics, request_outcomes
from expertd.service.engine.statistics import ModelStatistics, StepSums
from expertd.service.moe.request import StepResult

TOKENS = tuple(float(2**i) for i in range(16))
REQUESTS = tuple(float(2**i) for i in range(11))
IMBALANCE = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class JitStats(Protocol):
    """The result of `expertd.kernels.jit.stats()`."""

    @property
    def compilations(self) -> int: ...
    @property
    def compile_seconds(self) -> float: ...
    @property
    def cache_hits(self) -> int: ...


class _StepChildren(NamedTuple):
    compute_seconds: Histogram
    tokens: Counter
    batch_tokens: Histogram
    imbalance: Histogram
    batch_requests: Histogram
    queue_seconds: Histogram


class Metrics:
    """Records requests and steps; the other metrics are read when Prometheus scrapes."""

    def __init__(self, version: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # no `_created` series for each counter
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._version = version
        self._build = Info("expertd_build", "Version and backend of this server", registry=self.registry)
        self._build.info({"version": version, "backend": "", "device": ""})
        self.requests = RequestCounts([])  # of this process
        self._request_cells: list[memoryview[float]] = []  # of others
        self.keys = KeyCounts()  # of this process
        self._key_cells: list[memoryview[float]] = []  # of others
        self._queue_seconds = self._histogram(
            "queue_seconds", "From a request's acceptance to the start of its step", SECONDS, "model"
        )
        self._compute_seconds = self._histogram(
            "compute_seconds", "One step, copies included", SECONDS, "model", "layout"
        )
        self._tokens = self._counter("tokens", "Tokens computed", "model", "layout")
        self._batch_tokens = self._histogram("batch_tokens", "Tokens of one step", TOKENS, "model", "layout")
        self._batch_requests = self._histogram("batch_requests", "Requests of one step", REQUESTS, "model")
        self._imbalance = self._histogram(
            "load_imbalance_ratio",
            "Tokens of a step's busiest expert, divided by the mean of all experts",
            IMBALANCE,
            "model",
            "layout",
        )
        self._step_failures = self._counter("step_failures", "Steps that raised", "model")
        self._expert_tokens = ExpertTokens()
        self._step_sums: dict[str, StepSums] = {}
        # Looking up a child by its labels takes longer than counting, so children are cached.
        self._step_children = cache(
            lambda model, layout: _StepChildren(
                self._compute_seconds.labels(model, layout),
                self._tokens.labels(model, layout),
                self._batch_tokens.labels(model, layout),
                self._imbalance.labels(model, layout),
                self._batch_requests.labels(model),
                self._queue_seconds.labels(model),
            )
        )
        self.registry.register(self._expert_tokens)
        self.registry.register(CallbackCollector(self._collect_requests))
        self.watch(lambda: key_metrics([self.keys.cells, *self._key_cells]))

    def add_models(self, num_experts: Mapping[str, int]) -> None:
        """Start every series of these models (model -> experts) at 0, because rates need a first value."""
        self.requests = RequestCounts(num_experts)
        for model, experts in num_experts.items():
            for layout in Layout:
                self._step_children(model, layout)
            self._step_failures.labels(model)
            self._step_sums[model] = StepSums()
            self._expert_tokens.add(model, np.zeros(experts, dtype=np.int64))

    def add_process(self, requests: "memoryview[float]", keys: "memoryview[float]") -> None:
        """Include what another process counts with `RequestCounts` of the same models, and `KeyCounts`."""
        self._request_cells.append(requests)
        self._key_cells.append(keys)

    def set_backend(self, backend: str, device: str) -> None:
        """Report the backend and device that were chosen at start-up."""
        self._build.info({"version": self._version, "backend": backend, "device": device})

    def request_done(self, model: str, status: int, seconds: float) -> None:
        """Count an answered infer request; `model` is "" if it is not served."""
        self.requests.request_done(model, status, seconds)

    def refused(self, model: str, reason: Reason) -> None:
        """Count an infer request that got no output; `model` is "" if it is not served."""
        self.requests.refused(model, reason)

    def connection_refused(self, status: int) -> None:
        """Count input that a connection refused with `status`, before the application received a request."""
        self.requests.connection_refused(status)

    def step_done(self, model: str, result: StepResult, queue_seconds: Sequence[float]) -> None:
        """Count a step whose requests had waited `queue_seconds`."""
        self._step_sums[model].add(result.num_tokens, result.compute_seconds, queue_seconds)
        children = self._step_children(model, result.layout)
        children.compute_seconds.observe(result.compute_seconds)
        children.tokens.inc(result.num_tokens)
        children.batch_tokens.observe(result.num_tokens)
        children.batch_requests.observe(len(queue_seconds))
        for seconds in queue_seconds:
            children.queue_seconds.observe(seconds)
        tokens = result.tokens_per_expert.astype(np.int64)
        if total := int(tokens.sum()):
            children.imbalance.observe(int(tokens.max()) * tokens.size / total)
        self._expert_tokens.add(model, tokens)

    def step_failed(self, model: str, num_requests: int) -> None:
        """Count a step that raised."""
        self._step_failures.labels(model).inc()

    def statistics(self) -> dict[str, ModelStatistics]:
        """The statistics of every served model, by name; for the event loop."""
        outcomes = request_outcomes(self.requests.models, self._all_cells)
        return {model: ModelStatistics(sums, *outcomes[model]) for model, sums in self._step_sums.items()}

    def watch_models(self, ready: Callable[[], Mapping[str, bool]]) -> None:
        """Report the result of `ready` at each scrape: model -> whether it is ready."""

        def collect() -> Iterator[Metric]:
            gauge = GaugeMetricFamily("expertd_model_ready", "1 when the model is ready", labels=["model"])
            for model, is_ready in ready().items():
                gauge.add_metric([model], is_ready)
            yield gauge

        self.registry.register(CallbackCollector(collect))

    def watch_jit(self, stats: Callable[[], JitStats]) -> None:
        """Report the kernel compiler's statistics at each scrape."""

        def collect() -> Iterator[Metric]:
            now = stats()
            yield count("expertd_jit_compilations", "Kernels compiled", now.compilations)
            yield count("expertd_jit_compile_seconds", "Time spent compiling kernels", now.compile_seconds)
            yield count("expertd_jit_cache_hits", "Compiled kernels found in the cache", now.cache_hits)

        self.registry.register(CallbackCollector(collect))

    def watch_partitions(self, sizes: Callable[[], tuple[int, Mapping[str, int]] | None]) -> None:
        """Report SMs at each scrape: (SMs of the device, partition -> granted SMs), None without a GPU."""

        def collect() -> Iterator[Metric]:
            now = sizes()
            if now is None:
                return
            yield GaugeMetricFamily("expertd_device_sms", "SMs of the device", value=now[0])
            granted = GaugeMetricFamily("expertd_partition_sms", "SMs of a partition", labels=["partition"])
            for name, num_sms in now[1].items():
                granted.add_metric([name], num_sms)
            yield granted

        self.registry.register(CallbackCollector(collect))

    def watch_shared_memory(self, totals: Callable[[], Mapping[str, tuple[int, int]]]) -> None:
        """Report callers' shared memory at each scrape: kind -> (regions, bytes)."""

        def collect() -> Iterator[Metric]:
            regions = GaugeMetricFamily("expertd_shared_memory_regions", "Regions", labels=["kind"])
            sizes = GaugeMetricFamily("expertd_shared_memory_bytes", "Bytes of regions", labels=["kind"])
            for kind, (num_regions, num_bytes) in totals().items():
                regions.add_metric([kind], num_regions)
                sizes.add_metric([kind], num_bytes)
            yield from (regions, sizes)

        self.registry.register(CallbackCollector(collect))

    def watch_ranks(self, states: Callable[[], Sequence[RankState]]) -> None:
        """Report the result of `states` at each scrape: the state of each rank, if there are ranks."""
        self.registry.register(CallbackCollector(lambda: rank_metrics(states())))

    def watch(self, collect: Callable[[], Iterable[Metric]]) -> None:
        """Report the result of `collect` at each scrape."""
        self.registry.register(CallbackCollector(collect))

    def watch_channels(self, totals: Callable[[], tuple[int, int]]) -> None:
        """Report (open channels, bytes of their data regions) at each scrape."""

        def collect() -> Iterator[Metric]:
            channels, num_bytes = totals()
            yield GaugeMetricFamily("expertd_channels", "Open channels", value=channels)
            yield GaugeMetricFamily(
                "expertd_channel_bytes", "Bytes of channels' data regions", value=num_bytes
            )

        self.registry.register(CallbackCollector(collect))

    def watch_device_memory(self, memory: Callable[[], tuple[int, int] | None]) -> None:
        """Report (used, total) bytes of the device at each scrape, None without a GPU."""

        def collect() -> Iterator[Metric]:
            now = memory()
            if now is not None:
                used, total = now
                yield GaugeMetricFamily("expertd_device_memory_used_bytes", "Memory in use", value=used)
                yield GaugeMetricFamily("expertd_device_memory_total_bytes", "Total memory", value=total)

        self.registry.register(CallbackCollector(collect))

    def _collect_requests(self) -> Iterator[Metric]:
        return request_metrics(self.requests.models, self._all_cells)

    @property
    def _all_cells(self) -> "list[memoryview[float]]":
        return [self.requests.cells, *self._request_cells]

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"expertd_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        return Histogram(f"expertd_{name}", text, labels, buckets=buckets, registry=self.registry)
