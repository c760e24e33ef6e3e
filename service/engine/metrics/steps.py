"""The metrics of queues and steps. Many steps are counted together: one by one takes a fifth of a short step.

But not in one go, which takes about 0.35 ms: a thread that runs Python code keeps the thread of the steps
waiting for as long, and one decode step in a hundred took that much longer.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from prometheus_client.core import Metric

from expertd.layout import Layout
from expertd.service.engine.metrics.family import SECONDS, HistogramCounts, MetricFamily, samples
from expertd.service.moe.request import StepResult
from expertd.service.moe.shape import LayerShape

_NS = 1e9


@dataclass(slots=True)
class Total:
    """How often something happened, and the nanoseconds that it took."""

    count: int = 0
    ns: int = 0

    def add(self, count: int, seconds: float) -> None:
        """Add `count` times that took `seconds` together."""
        self.count += count
        self.ns += round(seconds * _NS)


@dataclass(slots=True)
class StepSums:
    """The steps of a model that succeeded.

    last_ms  when the last one ended, in milliseconds since 1970; 0: there was none
    queue    the requests of all steps, from acceptance to the start of their step
    compute  the same requests, with what their step took
    by_size  the steps, by their tokens rounded up to a power of two: a few entries, whatever the limits
    """

    last_ms: int = 0
    tokens: int = 0
    steps: int = 0
    queue: Total = field(default_factory=Total)
    compute: Total = field(default_factory=Total)
    by_size: dict[int, Total] = field(default_factory=dict)

    def add(
        self, num_tokens: NDArray[Any], seconds: NDArray[Any], num_requests: NDArray[Any], waited: float
    ) -> None:
        """Count steps by tokens, seconds and requests, each [steps]; and the seconds that these waited."""
        self.tokens += int(num_tokens.sum())
        self.steps += len(num_tokens)
        requests = int(num_requests.sum())
        self.queue.add(requests, waited)
        self.compute.add(requests, float(seconds @ num_requests))
        bits = np.frexp(np.maximum(num_tokens - 1, 0))[1]  # of the largest number below
        for each in set(bits.tolist()):  # np.unique takes longer
            of_size = bits == each
            total = self.by_size.setdefault(1 << each, Total())
            total.add(int(of_size.sum()), float(seconds[of_size].sum()))

    def copy(self) -> "StepSums":
        """The sums as they are now."""
        by_size = {size: replace(total) for size, total in self.by_size.items()}
        return replace(self, queue=replace(self.queue), compute=replace(self.compute), by_size=by_size)


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """A model's steps, and its requests from their headers to the end of their answers.

    success  with an output
    failure  with any other answer, or with none because the client had disconnected
    """

    steps: StepSums
    success: Total
    failure: Total


QUEUE_REQUESTS = MetricFamily(
    "gauge", "queue_requests", "requests that wait for their step", "requests", ("model",)
)
QUEUE_TOKENS = MetricFamily("gauge", "queue_tokens", "tokens that wait for their step", "tokens", ("model",))
CHUNKS = MetricFamily(
    "counter",
    "chunks",
    "chunks of long requests in steps; 0 as long as none has competed with others",
    "chunks",
    ("model",),
)


class QueueState(NamedTuple):
    """Of one model: what waits, and the chunks of long requests that steps have had."""

    num_requests: int
    num_tokens: int
    num_chunks: int


_MAX_KEPT = 64  # steps, before they are counted: what 128 keep makes Python collect garbage each time
_AT_ONCE = 8  # steps whose experts' tokens are counted in a row
_POWERS = tuple(float(2**i) for i in range(16))
_RATIOS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)

QUEUE = MetricFamily(
    "histogram",
    "queue_seconds",
    "from a request's acceptance to the start of its step",
    "seconds",
    ("model",),
    SECONDS,
)
COMPUTE = MetricFamily(
    "histogram",
    "compute_seconds",
    "one step: from its start, or from the end of the step before if that is later, until its outputs are "
    "in place",
    "seconds",
    ("model", "layout"),
    SECONDS,
)
TOKENS = MetricFamily("counter", "tokens", "tokens computed", "tokens", ("model", "layout"))
FLOPS = MetricFamily(
    "counter",
    "gemm_flops",
    "floating-point operations of the experts' GEMMs: 6 x hidden_size x intermediate_size for each token and "
    "expert of it",
    "operations",
    ("model", "layout"),
)
BYTES = MetricFamily(
    "counter",
    "gemm_bytes",
    "the least bytes of GPU memory that steps move: the weights of activated experts once a step, and hidden "
    "states in bf16, read and written",
    "bytes",
    ("model", "layout"),
)
BATCH_TOKENS = MetricFamily(
    "histogram", "batch_tokens", "tokens of one step", "tokens", ("model", "layout"), _POWERS
)
BATCH_REQUESTS = MetricFamily(
    "histogram",
    "batch_requests",
    "requests of one step; one in chunks counts in its first step",
    "requests",
    ("model",),
    _POWERS[:11],
)
ACTIVATED = MetricFamily(
    "histogram",
    "activated_experts",
    "experts with at least one token in a step, of those held here",
    "experts",
    ("model",),
    _POWERS[:11],
)
IMBALANCE = MetricFamily(
    "histogram",
    "load_imbalance_ratio",
    "tokens of a step's busiest expert divided by the mean of all experts",
    "ratio",
    ("model", "layout"),
    _RATIOS,
)
LOAD = MetricFamily(
    "histogram",
    "expert_load_ratio",
    f"an expert's tokens in up to {_MAX_KEPT} steps in a row, divided by the mean of all experts: one "
    "value for each expert",
    "ratio",
    ("model",),
    (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, *_RATIOS),
)
EXPERT_TOKENS = MetricFamily(
    "counter",
    "expert_tokens",
    "tokens computed by an expert; 0 for experts held elsewhere",
    "tokens",
    ("model", "expert"),
    when="with at most `metrics.max_expert_series` experts in all models together",
)
EMPTY_SLOTS = MetricFamily(
    "counter",
    "slots_without_expert",
    "slots whose id names no expert: -1 or num_experts, in a GPU's memory any outside 0 to num_experts - 1",
    "slots",
    ("model",),
)
FAILURES = MetricFamily("counter", "step_failures", "steps that failed", "steps", ("model",))
FAMILIES = (
    QUEUE_REQUESTS, QUEUE_TOKENS, CHUNKS, QUEUE, COMPUTE, TOKENS, FLOPS, BYTES, BATCH_TOKENS, BATCH_REQUESTS,
    ACTIVATED, IMBALANCE, LOAD, EXPERT_TOKENS, EMPTY_SLOTS, FAILURES,
)  # fmt: skip
_STEP_FAMILIES = tuple(family for family in FAMILIES[3:] if family is not EXPERT_TOKENS)
_LABELS, _WHEN = ("model", "lane"), "with `lanes`"
LANE_QUEUE = MetricFamily(
    "histogram",
    "lane_queue_seconds",
    "as `expertd_queue_seconds`, of each lane",
    "seconds",
    _LABELS,
    SECONDS,
    _WHEN,
)
LANE_COMPUTE = MetricFamily(
    "histogram",
    "lane_compute_seconds",
    "as `expertd_compute_seconds`, of each lane",
    "seconds",
    _LABELS,
    SECONDS,
    _WHEN,
)
LANE_TOKENS = MetricFamily(
    "counter", "lane_tokens", "tokens computed on a lane", "tokens", _LABELS, when=_WHEN
)
LANE_QUEUE_REQUESTS = MetricFamily(
    "gauge", "lane_queue_requests", "requests that wait for a lane", "requests", _LABELS, when=_WHEN
)
LANE_QUEUE_TOKENS = MetricFamily(
    "gauge", "lane_queue_tokens", "tokens that wait for a lane", "tokens", _LABELS, when=_WHEN
)
LANE_FAMILIES = (LANE_QUEUE, LANE_COMPUTE, LANE_TOKENS, LANE_QUEUE_REQUESTS, LANE_QUEUE_TOKENS)


def queue_metrics(states: Mapping[str, QueueState]) -> Iterator[Metric]:
    """The state of each model's queue."""
    yield from samples(QUEUE_REQUESTS, {model: state.num_requests for model, state in states.items()})
    yield from samples(QUEUE_TOKENS, {model: state.num_tokens for model, state in states.items()})
    yield from samples(CHUNKS, {model: state.num_chunks for model, state in states.items()})


def lane_queue_metrics(states: Mapping[str, Mapping[str, QueueState]]) -> Iterator[Metric]:
    """What waits for each lane: lane -> model -> state."""
    waiting = {(model, lane): each for lane, models in states.items() for model, each in models.items()}
    yield from samples(LANE_QUEUE_REQUESTS, {labels: state.num_requests for labels, state in waiting.items()})
    yield from samples(LANE_QUEUE_TOKENS, {labels: state.num_tokens for labels, state in waiting.items()})


class StepTotals(NamedTuple):
    """The steps of a model so far, in both layouts; expert_tokens is [E]."""

    sums: StepSums
    flops: int
    num_bytes: int
    failures: int
    expert_tokens: NDArray[np.int64]


class _Kept(NamedTuple):
    """What is counted of a step; neither its outputs nor its layer's weights are kept."""

    layout: Layout
    num_tokens: int
    seconds: float
    count_tokens: Callable[[], NDArray[np.integer[Any]]]
    queue_seconds: Sequence[float]
    empty_slots: int
    lane: str


class _Series:
    """Series with the same labels: of histograms, and the totals of counters."""

    def __init__(self, *families: MetricFamily) -> None:
        self._counts = {each: HistogramCounts(each) for each in families if each.kind == "histogram"}
        self.totals = {each: 0 for each in families if each.kind == "counter"}

    def add(self, family: MetricFamily, values: ArrayLike) -> None:
        """Count values of a histogram."""
        self._counts[family].add(values)

    def show(self, metrics: Mapping[MetricFamily, Any], *labels: str) -> None:
        """Show them in a scrape."""
        for family, counts in self._counts.items():
            counts.add_to(metrics[family], *labels)
        for family, total in self.totals.items():
            metrics[family].add_metric(labels, total)


class _OfModel:
    """The series of a model."""

    def __init__(self, shape: LayerShape, lanes: Sequence[str]) -> None:
        self.shape = shape
        self.kept: deque[_Kept] = deque()
        self.counting: Iterator[None] | None = None  # counts those that were kept before
        self.series = _Series(QUEUE, BATCH_REQUESTS, ACTIVATED, LOAD, EMPTY_SLOTS, FAILURES)
        of_layout = COMPUTE, BATCH_TOKENS, IMBALANCE, TOKENS, FLOPS, BYTES
        self.layouts = {layout: _Series(*of_layout) for layout in Layout}
        self.lanes = {lane: _Series(LANE_QUEUE, LANE_COMPUTE, LANE_TOKENS) for lane in lanes}
        self.expert_tokens: NDArray[np.int64] = np.zeros(shape.num_experts, np.int64)
        self.sums = StepSums()


class StepMetrics:
    """Counts steps. `add` and `failed` are for one thread at a time, all else is for any.

    shapes             the served models'
    max_expert_series  experts of all models up to which each has a series
    lanes              their names, if there are several
    """

    def __init__(
        self, shapes: Mapping[str, LayerShape], max_expert_series: int, lanes: Sequence[str] = ()
    ) -> None:
        self._models = {name: _OfModel(shape, lanes) for name, shape in shapes.items()}
        by_expert = sum(shape.num_experts for shape in shapes.values()) <= max_expert_series
        of_lanes = (LANE_QUEUE, LANE_COMPUTE, LANE_TOKENS) if lanes else ()
        self._families = (*_STEP_FAMILIES, *((EXPERT_TOKENS,) if by_expert else ()), *of_lanes)
        self._lock = threading.Lock()

    def add(self, model: str, result: StepResult, queue_seconds: Sequence[float], lane: str = "") -> None:
        """Count a step of `lane` whose requests had waited `queue_seconds`."""
        of_model = self._models[model]
        kept = of_model.kept
        of_step = result.layout, result.num_tokens, result.compute_seconds, result.count_tokens
        kept.append(_Kept(*of_step, queue_seconds, result.empty_slots, lane))
        of_model.sums.last_ms = time.time_ns() // 1_000_000
        if of_model.counting is not None or len(kept) >= _MAX_KEPT:
            self._count_some(of_model)

    def failed(self, model: str) -> None:
        """Count a step that raised."""
        self._models[model].series.totals[FAILURES] += 1

    def sums(self) -> dict[str, StepSums]:
        """The sums of all steps so far, by model."""
        return {name: totals.sums for name, totals in self.totals().items()}

    def totals(self) -> dict[str, StepTotals]:
        """What all steps so far add up to, by model."""
        found = {}
        for name, model in self._models.items():
            with self._counted(model):
                found[name] = _totals(model)
        return found

    def collect(self) -> Iterator[Metric]:
        """The metrics of all steps so far."""
        metrics: dict[MetricFamily, Any] = {
            family: family.histogram() if family.kind == "histogram" else family.counter()
            for family in self._families
        }
        for name, model in self._models.items():
            with self._counted(model):
                model.series.show(metrics, name)
                for label, series in chain(model.layouts.items(), model.lanes.items()):
                    series.show(metrics, name, label)
                by_expert = model.expert_tokens
            if EXPERT_TOKENS in metrics:
                for expert, tokens in enumerate(by_expert.tolist()):
                    metrics[EXPERT_TOKENS].add_metric([name, str(expert)], tokens)
        yield from metrics.values()

    def _count_some(self, model: _OfModel) -> None:
        """Begin to count the steps that were kept, or go on for a moment; not while another thread does."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if model.counting is None:
                model.counting = _counting(model)
            if next(model.counting, True):
                model.counting = None
        finally:
            self._lock.release()

    @contextmanager
    def _counted(self, model: _OfModel) -> Iterator[None]:
        """Count the steps that were kept; no thread counts others in the context."""
        with self._lock:
            for _ in model.counting or ():
                pass
            model.counting = None
            for _ in _counting(model):
                pass
            yield


def _counting(model: _OfModel) -> Iterator[None]:
    """Counts the steps that are kept, a part each time."""
    steps = [model.kept.popleft() for _ in range(len(model.kept))]
    if not steps:
        return
    by_expert = np.empty((len(steps), model.shape.num_experts), np.int64)
    for index, step in enumerate(steps):
        by_expert[index] = step.count_tokens()
        if index % _AT_ONCE == _AT_ONCE - 1:
            yield
    waited = list(chain.from_iterable(step.queue_seconds for step in steps))
    num_requests = np.array([len(step.queue_seconds) for step in steps])
    tokens = np.array([step.num_tokens for step in steps])
    seconds = np.array([step.seconds for step in steps])
    yield
    model.sums.add(tokens, seconds, num_requests, sum(waited))
    yield
    model.series.add(QUEUE, waited)
    model.series.add(BATCH_REQUESTS, num_requests)
    for lane, on_lane in model.lanes.items():
        yield
        of = [index for index, step in enumerate(steps) if step.lane == lane]
        on_lane.add(LANE_QUEUE, list(chain.from_iterable(steps[index].queue_seconds for index in of)))
        on_lane.add(LANE_COMPUTE, seconds[of])
        on_lane.totals[LANE_TOKENS] += int(tokens[of].sum())
    yield
    activated = np.count_nonzero(by_expert, axis=1)
    model.series.add(ACTIVATED, activated)
    yield
    totals = by_expert.sum(axis=0)
    model.expert_tokens = model.expert_tokens + totals
    any_tokens = int(totals.sum())
    if any_tokens:
        model.series.add(LOAD, totals * len(totals) / any_tokens)
    if model.shape.is_part:
        empty_slots = sum(step.empty_slots for step in steps)
    else:  # every slot with an expert has been computed
        empty_slots = int(tokens.sum()) * model.shape.top_k - any_tokens
    model.series.totals[EMPTY_SLOTS] += empty_slots
    for layout, series in model.layouts.items():
        yield
        of = [index for index, step in enumerate(steps) if step.layout is layout]
        if of:
            yield from _adding(series, model.shape, tokens[of], seconds[of], by_expert[of], activated[of])


def _totals(model: _OfModel) -> StepTotals:
    flops, num_bytes = (
        sum(series.totals[family] for series in model.layouts.values()) for family in (FLOPS, BYTES)
    )
    failures = model.series.totals[FAILURES]
    return StepTotals(model.sums.copy(), flops, num_bytes, failures, model.expert_tokens)


def _adding(
    series: _Series,
    shape: LayerShape,
    tokens: NDArray[np.int64],
    seconds: NDArray[np.float64],
    by_expert: NDArray[np.int64],
    activated: NDArray[np.int64],
) -> Iterator[None]:
    """Counts steps of one layout: tokens, seconds and activated experts [steps], and by_expert [steps, E]."""
    series.add(COMPUTE, seconds)
    series.add(BATCH_TOKENS, tokens)
    yield
    pairs = by_expert.sum(axis=1)
    used = pairs > 0
    series.add(IMBALANCE, by_expert.max(axis=1)[used] * by_expert.shape[1] / pairs[used])
    yield
    num_tokens, num_pairs = int(tokens.sum()), int(pairs.sum())
    series.totals[TOKENS] += num_tokens
    shared = shape.num_shared_experts
    series.totals[FLOPS] += shape.pair_flops * (num_pairs + shared * num_tokens)
    weights = shape.expert_bytes * int(activated.sum())
    weights += shape.shared_expert_bytes * shared * int(np.count_nonzero(tokens))
    series.totals[BYTES] += weights + 4 * shape.hidden_size * num_tokens
