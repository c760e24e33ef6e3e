"""The metrics of lanes: their steps, and what waits for them."""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

from prometheus_client.core import Metric

from expertd.service.engine.metric_family import SECONDS, Family
from expertd.service.engine.queue_metrics import QueueState
from expertd.service.engine.steps import StepObserver
from expertd.service.engine.tallies import Tally
from expertd.service.moe.request import StepResult

_MOST_KEPT = 64  # steps, before they are counted together
_LABELS, _WHEN = ("model", "lane"), "with `lanes`; lane: decode or prefill"
QUEUE = Family(
    "histogram",
    "lane_queue_seconds",
    "as `expertd_queue_seconds`, of each lane",
    "seconds",
    _LABELS,
    SECONDS,
    when=_WHEN,
)
COMPUTE = Family(
    "histogram",
    "lane_compute_seconds",
    "as `expertd_compute_seconds`, of each lane",
    "seconds",
    _LABELS,
    SECONDS,
    when=_WHEN,
)
TOKENS = Family("counter", "lane_tokens", "tokens computed on a lane", "tokens", _LABELS, when=_WHEN)
QUEUE_REQUESTS = Family(
    "gauge", "lane_queue_requests", "requests that wait for a lane", "requests", _LABELS, when=_WHEN
)
QUEUE_TOKENS = Family(
    "gauge", "lane_queue_tokens", "tokens that wait for a lane", "tokens", _LABELS, when=_WHEN
)
FAMILIES = (QUEUE, COMPUTE, TOKENS, QUEUE_REQUESTS, QUEUE_TOKENS)


class _Series:
    """Of a model on a lane. `kept` has seconds in the queue, seconds and tokens of steps not yet counted."""

    def __init__(self) -> None:
        self.queue, self.compute, self.tokens = Tally(QUEUE), Tally(COMPUTE), 0
        self.kept: deque[tuple[Sequence[float], float, int]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what was kept; no thread counts more in the context."""
        with self._lock:
            if steps := [self.kept.popleft() for _ in range(len(self.kept))]:
                self.queue.add(list(chain.from_iterable(waited for waited, _, _ in steps)))
                self.compute.add([seconds for _, seconds, _ in steps])
                self.tokens += sum(tokens for _, _, tokens in steps)
            yield


class LaneMetrics:
    """Counts the steps of lanes beside those of all steps; every series exists from the start, at 0."""

    def __init__(self, models: Sequence[str], lanes: Sequence[str]) -> None:
        self._series = {(model, lane): _Series() for model in models for lane in lanes}

    def step_done(self, lane: str, model: str, result: StepResult, queue_seconds: Sequence[float]) -> None:
        """Count a step of `lane`."""
        series = self._series[model, lane]
        series.kept.append((queue_seconds, result.compute_seconds, result.num_tokens))
        if len(series.kept) >= _MOST_KEPT:
            with series.counted():
                pass

    def collect(self) -> Iterator[Metric]:
        """The metrics of all steps so far."""
        queue, compute, tokens = QUEUE.histogram(), COMPUTE.histogram(), TOKENS.counter()
        for of, series in self._series.items():
            with series.counted():
                series.queue.add_to(queue, *of)
                series.compute.add_to(compute, *of)
                tokens.add_metric(of, series.tokens)
        yield from (queue, compute, tokens)


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
    requests, tokens = QUEUE_REQUESTS.gauge(), QUEUE_TOKENS.gauge()
    for lane, models in states.items():
        for model, state in models.items():
            requests.add_metric([model, lane], state.num_requests)
            tokens.add_metric([model, lane], state.num_tokens)
    yield from (requests, tokens)
