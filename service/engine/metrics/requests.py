"""Counts of infer requests, and of calls by their key, in memory that processes of a server can share.

Each process adds to cells of its own, and the one that answers scrapes sums them. A process that ends leaves
its cells to its successor, so no sum ever goes back.
"""

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Metric

from expertd.service.engine.metrics.family import SECONDS, MetricFamily, samples
from expertd.service.engine.metrics.steps import Total
from expertd.service.engine.refusals import CONNECTION_REASONS, REASONS, ConnectionReason, Reason

# Where the time of a request with an output went: its body and checks, its queue, its steps, its answer.
STAGES = ("receive", "queue", "compute", "send")
StageSeconds = tuple[float, float, float]
"""Seconds of a request until its acceptance, in its queue, and in its steps."""

REQUESTS = MetricFamily(
    "counter",
    "requests",
    'infer requests; status 499: the client disconnected; model "": not served',
    "requests",
    ("model", "status"),
)
REFUSALS = MetricFamily(
    "counter", "refusals", "infer requests without output, by reason", "requests", ("model", "reason")
)
REQUEST_SECONDS = MetricFamily(
    "histogram",
    "request_seconds",
    "of the requests with an output: from a request's headers, or from the reading of a request in a "
    "channel, to the end of its answer",
    "seconds",
    ("model",),
    SECONDS,
)
STAGE_SECONDS = MetricFamily(
    "counter",
    "stage_seconds",
    "time of the requests with an output; stage: receive (the body, and checks), queue, compute (their "
    "steps), send (from there to the end of the answer); of a channel, receive is 0, because its caller "
    "writes",
    "seconds",
    ("model", "stage"),
    when="with several HTTP processes, only of requests over channels and gRPC, and of those with regions",
)
CONNECTION_REFUSALS = MetricFamily(
    "counter",
    "connection_refusals",
    "input refused before it was a request: bad syntax, headers too large or too late, too many "
    "connections (503), a TLS handshake that failed (400) or took longer than `header_timeout_seconds` "
    "(408)",
    "connections",
    ("status",),
)


class RequestTotals(NamedTuple):
    """The infer requests to a model so far.

    success, failure  those with an output, and all others
    refused           reason -> requests, of the reasons that there were
    by_seconds        requests with an output by their time: up to each of SECONDS, and above the last one
    """

    success: Total
    failure: Total
    refused: dict[Reason, int]
    by_seconds: list[int]


CELL_BYTES = 8  # a float64
_MAX_KEPT = 16  # requests, before they are counted: that takes 10 µs, for which other threads may wait
_Kept = tuple[
    int, Reason | None, float, StageSeconds | None
]  # where the model's cells begin, and what is counted
StatusOf = Callable[[Reason | ConnectionReason | None], object]
"""What metrics call requests and input that were refused for a reason, or requests with an output (None)."""
# Of one model: requests with an output, refusals by reason, the seconds of those with an output, of all
# others, seconds by stage, and requests with an output by seconds: with quick refusals, overload would look
# fast.
_OUTCOMES: tuple[Reason | None, ...] = (None, *REASONS)
_SUCCEEDED = len(_OUTCOMES)
_FAILED = _SUCCEEDED + 1
_STAGES = _FAILED + 1
_BUCKETS = _STAGES + len(STAGES)
_STRIDE = _BUCKETS + len(SECONDS) + 1
_INDICES = {outcome: index for index, outcome in enumerate(_OUTCOMES)}


def num_cells(num_models: int) -> int:
    """How many cells the requests to `num_models` models take."""
    return (num_models + 1) * _STRIDE + len(CONNECTION_REASONS)


class RequestCounts:
    """Adds to `cells` (float64; None: to new ones). For one process.

    Without other processes that read them, requests are counted when somebody reads `cells`, or some at a
    time: one by one, when the processor has other things in its caches, that takes longer.
    """

    def __init__(self, models: Iterable[str], cells: "memoryview[float] | None" = None) -> None:
        self.models = (*models, "")  # the last one: not served
        size = num_cells(len(self.models) - 1)
        self._max_kept = _MAX_KEPT if cells is None else 1
        self._cells = memoryview(bytearray(size * CELL_BYTES)).cast("d") if cells is None else cells[:size]
        self._starts = {model: _STRIDE * index for index, model in enumerate(self.models)}
        self._kept: deque[_Kept] = deque()
        self._lock = threading.Lock()

    @property
    def cells(self) -> "memoryview[float]":
        """A copy of all counts up to now; on any thread."""
        self._count()
        with self._lock:
            return memoryview(self._cells.tobytes()).cast("d")

    def request_done(
        self, model: str, reason: Reason | None, seconds: float, stages: StageSeconds | None = None
    ) -> None:
        """Count an answered infer request; `model` is "" if it is not served.

        reason  why it got no output; None: it has one
        stages  of the `seconds`, if it has an output and they are known
        """
        self._kept.append((self._starts[model], reason, seconds, stages))
        if len(self._kept) >= self._max_kept:
            self._count()

    def _count(self) -> None:
        cells = self._cells
        with self._lock:
            for _ in range(len(self._kept)):
                start, reason, seconds, stages = self._kept.popleft()
                cells[start + _INDICES[reason]] += 1
                if reason is None:
                    cells[start + _SUCCEEDED] += seconds
                    cells[start + _BUCKETS + bisect_left(SECONDS, seconds)] += 1
                else:
                    cells[start + _FAILED] += seconds
                if stages is not None:
                    receive, queue, compute = stages
                    first = start + _STAGES
                    cells[first] += receive
                    cells[first + 1] += queue
                    cells[first + 2] += compute
                    cells[first + 3] += max(0.0, seconds - receive - queue - compute)

    def connection_refused(self, reason: ConnectionReason) -> None:
        """Count input that a connection refused, before the application received a request."""
        self._cells[len(self._starts) * _STRIDE + CONNECTION_REASONS.index(reason)] += 1


def request_metrics(
    models: Sequence[str], cells: Iterable["memoryview[float]"], status_of: StatusOf
) -> Iterator[Metric]:
    """The metrics of requests, summed over the cells of all processes."""
    total = _summed(cells)
    requests, refusals, stages = REQUESTS.counter(), REFUSALS.counter(), STAGE_SECONDS.counter()
    seconds = REQUEST_SECONDS.histogram()
    for index, model in enumerate(models):
        row = total[index * _STRIDE : (index + 1) * _STRIDE]
        by_status: dict[object, float] = {}
        for reason, value in zip(_OUTCOMES, row.tolist(), strict=False):
            if model or value or reason == "unknown_model":
                status = status_of(reason)
                by_status[status] = by_status.get(status, 0.0) + value
                if reason is not None:
                    refusals.add_metric([model, reason], value)
        for status, value in by_status.items():
            requests.add_metric([model, str(status)], value)
        bounds = [*map(str, SECONDS), "+Inf"]
        buckets = list(zip(bounds, np.cumsum(row[_BUCKETS:]).tolist(), strict=True))
        if model:
            seconds.add_metric([model], buckets, float(row[_SUCCEEDED]))
        for stage, value in zip(STAGES, row[_STAGES:], strict=False):
            if model:
                stages.add_metric([model, stage], float(value))
    connections = CONNECTION_REFUSALS.counter()
    for refusal, value in zip(CONNECTION_REASONS, total[len(models) * _STRIDE :], strict=False):
        connections.add_metric([str(status_of(refusal))], float(value))
    yield from (requests, refusals, seconds, stages, connections)


def request_totals(models: Sequence[str], cells: Iterable["memoryview[float]"]) -> dict[str, RequestTotals]:
    """model -> its requests, over the cells of all processes."""
    total = _summed(cells)
    totals = {}
    for index, model in enumerate(models):
        row = total[index * _STRIDE : (index + 1) * _STRIDE].tolist()
        succeeded, failed = Total(), Total()
        succeeded.add(int(row[0]), row[_SUCCEEDED])
        refused = {
            reason: int(number) for reason, number in zip(REASONS, row[1:_SUCCEEDED], strict=True) if number
        }
        failed.add(sum(refused.values()), row[_FAILED])
        by_seconds = [int(number) for number in row[_BUCKETS:]]
        totals[model] = RequestTotals(succeeded, failed, refused, by_seconds)
    return totals


def _summed(cells: Iterable["memoryview[float]"]) -> NDArray[np.float64]:
    total: NDArray[np.float64] = np.sum([np.array(each) for each in cells], axis=0)
    return total


# Names over the life of a server; further ones are counted without a name.
_MAX_NAMES = 1024
_NAME_BYTES = 64
_KEY_RESULTS = ("admitted", "forbidden")
_KEY_COUNTS = _MAX_NAMES * len(_KEY_RESULTS)
KEY_REQUESTS = MetricFamily(
    "counter",
    "key_requests",
    "calls of all kinds but health, by the name of their API key; result: admitted, forbidden (the key "
    'lacks the right), or with key "" unauthorized (no key, or an unknown one)',
    "requests",
    ("key", "result"),
)
FAMILIES = (REQUESTS, REFUSALS, REQUEST_SECONDS, STAGE_SECONDS, CONNECTION_REFUSALS, KEY_REQUESTS)
NUM_KEY_CELLS = _KEY_COUNTS + _MAX_NAMES * _NAME_BYTES // 8  # float64: the counts, then the names


class KeyCounts:
    """Adds to `cells` (float64; None: to new ones). For one thread of one process.

    The first name is "": of calls without a known key, whose second count is of those refused for that.
    """

    def __init__(self, cells: "memoryview[float] | None" = None) -> None:
        self.cells = memoryview(bytearray(NUM_KEY_CELLS * 8)).cast("d") if cells is None else cells
        self._names = _names(self.cells)
        self._indices = {name: index for index, name in enumerate(_written(self._names))}

    def add(self, name: str) -> None:
        """Begin the counts of a name, at 0."""
        self._index(name)

    def admitted(self, name: str) -> None:
        """Count a call whose key has the right for it."""
        self.cells[2 * self._index(name)] += 1

    def forbidden(self, name: str) -> None:
        """Count a call whose key lacks the right for it."""
        self.cells[2 * self._index(name) + 1] += 1

    def unauthorized(self) -> None:
        """Count a call without a key, or with an unknown one."""
        self.cells[1] += 1

    def _index(self, name: str) -> int:
        index = self._indices.get(name)
        if index is None:
            index = len(self._indices)
            if index == _MAX_NAMES:
                return 0
            data = name.encode("ascii").ljust(_NAME_BYTES, b"\0")
            self._names[index * _NAME_BYTES : (index + 1) * _NAME_BYTES] = data
            self._indices[name] = index
        return index


def key_metrics(cells: Iterable["memoryview[float]"]) -> Iterator[Metric]:
    """The metric of keys, summed over the cells of all processes."""
    totals: dict[tuple[str, str], float] = {("", "unauthorized"): 0.0}
    for each in cells:
        for index, name in enumerate(_written(_names(each))):
            for number, result in enumerate(_KEY_RESULTS):
                value = each[2 * index + number]
                if name or value:
                    shown = "unauthorized" if not name and number else result
                    totals[name, shown] = totals.get((name, shown), 0.0) + value
    yield from samples(KEY_REQUESTS, totals)


def _names(cells: "memoryview[float]") -> memoryview:
    return cells[_KEY_COUNTS:NUM_KEY_CELLS].cast("B")


def _written(names: memoryview) -> Iterator[str]:
    """The names that were written, in order; the first one is ""."""
    yield ""
    for start in range(_NAME_BYTES, len(names), _NAME_BYTES):
        name = bytes(names[start : start + _NAME_BYTES]).rstrip(b"\0")
        if not name:
            return
        yield name.decode("ascii")
