"""The metrics of lanes: their steps, and what waits for them."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric

from expertd.service.engine.queue_metrics import QueueState
from expertd.service.engine.request_counts import SECONDS
from expertd.service.engine.steps import StepObserver
from expertd.service.moe.request import StepResult

_LABELS = ("model", "lane")


class _Series(NamedTuple):
    queue_seconds: Histogram
    compute_seconds: Histogram
    tokens: Counter


class LaneMetrics:
    """Counts the steps of lanes beside those of all steps; every series exists from the start, at 0.

    on_step  is called with each step: its lane, its tokens, its seconds
    """

    def __init__(self, registry: CollectorRegistry, models: Sequence[str], lanes: Sequence[str]) -> None:
        queue = Histogram(
            "expertd_lane_queue_seconds",
            "From a request's acceptance to the start of its step",
            _LABELS,
            buckets=SECONDS,
            registry=registry,
        )
        compute = Histogram(
            "expertd_lane_compute_seconds", "One step", _LABELS, buckets=SECONDS, registry=registry
        )
        tokens = Counter("expertd_lane_tokens", "Tokens computed", _LABELS, registry=registry)
        self.on_step: Callable[[str, int, float], None] = lambda lane, tokens, seconds: None
        self._series = {  # looking one up by its labels takes longer than counting
            of: _Series(queue.labels(*of), compute.labels(*of), tokens.labels(*of))
            for of in itertools.product(models, lanes)
        }

    def step_done(self, lane: str, model: str, result: StepResult, queue_seconds: Sequence[float]) -> None:
        """Count a step of `lane`."""
        self.on_step(lane, result.num_tokens, result.compute_seconds)
        series = self._series[model, lane]
        series.compute_seconds.observe(result.compute_seconds)
        series.tokens.inc(result.num_tokens)
        for seconds in queue_seconds:
            series.queue_seconds.observe(seconds)


class LaneObserver:
    """Reports the steps of one lane to `every` and to `lanes`. Implements `StepObserver`."""

    def __init__(self, lane: str, every: StepObserver, lanes: LaneMetrics) -> None:
        self._lane, self._every, self._lanes = lane, every, lanes

    def step_done(self, model: str, result: StepResult, queue_seconds: Sequence[float]) -> None:
        self._every.step_done(model, result, queue_seconds)
        self._lanes.step_done(self._lane, model, result, queue_seconds)

    def step_failed(self, model: str, num_requests: int) -> None:
        self._every.step_failed(model, num_requests)


def lane_queue_metrics(states: Mapping[str, Mapping[str, QueueState]]) -> Iterator[Metric]:
    """What waits for each lane: lane -> model -> state."""
    requests = GaugeMetricFamily("expertd_lane_queue_requests", "Requests waiting", labels=_LABELS)
    tokens = GaugeMetricFamily("expertd_lane_queue_tokens", "Tokens waiting", labels=_LABELS)
    for lane, models in states.items():
        for model, state in models.items():
            requests.add_metric([model, lane], state.num_requests)
            tokens.add_metric([model, lane], state.num_tokens)
    yield from (requests, tokens)
