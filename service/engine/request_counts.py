"""Counts of infer requests, as numbers in memory that several processes of a server can share.

Each process adds to cells of its own, and the one that answers scrapes sums them. A process that ends leaves
its cells to its successor, so no sum ever goes back.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from expertd.service.engine.refusals import REASONS, Reason
from expertd.service.engine.statistics import Total

# Every status of an infer request; 499: no response, because the client had disconnected.
STATUSES = (200, 400, 401, 403, 404, 408, 413, 415, 429, 499, 500, 503)
CONNECTION_STATUSES = (400, 408, 431, 500, 501, 503, 505)  # of refusals by a connection
# An expert layer takes about a millisecond: 50 us to 26 s, by factors of 2.
SECONDS = tuple(50e-6 * 2**i for i in range(20))

CELL_BYTES = 8  # a float64
# Of one model: requests by status, refusals by reason, the sum of their seconds, of those that failed alone,
# and requests by seconds.
_REASONS = len(STATUSES)
_SUM = _REASONS + len(REASONS)
_FAILED = _SUM + 1
_BUCKETS = _FAILED + 1
_STRIDE = _BUCKETS + len(SECONDS) + 1
_STATUS_PLACES = {status: place for place, status in enumerate(STATUSES)}
_REASON_PLACES = {reason: _REASONS + place for place, reason in enumerate(REASONS)}


def num_cells(num_models: int) -> int:
    """How many cells the requests to `num_models` models take."""
    return (num_models + 1) * _STRIDE + len(CONNECTION_STATUSES)


class RequestCounts:
    """Adds to `cells` (float64; None: to new ones). For one thread of one process."""

    def __init__(self, models: Iterable[str], cells: "memoryview[float] | None" = None) -> None:
        self.models = (*models, "")  # the last one: not served
        size = num_cells(len(self.models) - 1)
        self.cells = memoryview(bytearray(size * CELL_BYTES)).cast("d") if cells is None else cells[:size]
        self._starts = {model: _STRIDE * place for place, model in enumerate(self.models)}

    def request_done(self, model: str, status: int, seconds: float) -> None:
        """Count an answered infer request; `model` is "" if it is not served."""
        start, cells = self._starts[model], self.cells
        cells[start + _STATUS_PLACES[status]] += 1
        cells[start + _SUM] += seconds
        if status != 200:
            cells[start + _FAILED] += seconds
        cells[start + _BUCKETS + bisect_left(SECONDS, seconds)] += 1

    def refused(self, model: str, reason: Reason) -> None:
        """Count an infer request that got no output; `model` is "" if it is not served."""
        self.cells[self._starts[model] + _REASON_PLACES[reason]] += 1

    def connection_refused(self, status: int) -> None:
        """Count input that a connection refused with `status`, before the application received a request."""
        self.cells[len(self._starts) * _STRIDE + CONNECTION_STATUSES.index(status)] += 1


def request_metrics(models: Sequence[str], cells: Iterable["memoryview[float]"]) -> Iterator[Metric]:
    """The metrics of requests, summed over the cells of all processes."""
    total = _summed(cells)
    requests = CounterMetricFamily("expertd_requests", "Infer requests answered", labels=["model", "status"])
    refusals = CounterMetricFamily(
        "expertd_refusals", "Infer requests that got no output, by reason", labels=["model", "reason"]
    )
    seconds = HistogramMetricFamily(
        "expertd_request_seconds",
        "From an infer request's headers to the end of its answer",
        labels=["model"],
    )
    for place, model in enumerate(models):
        row = total[place * _STRIDE : (place + 1) * _STRIDE]
        for status, value in zip(STATUSES, row, strict=False):
            if model or value or status == 404:
                requests.add_metric([model, str(status)], float(value))
        for reason, value in zip(REASONS, row[_REASONS:], strict=False):
            if model or value or reason == "unknown_model":
                refusals.add_metric([model, reason], float(value))
        bounds = [*map(str, SECONDS), "+Inf"]
        buckets = list(zip(bounds, np.cumsum(row[_BUCKETS:]).tolist(), strict=True))
        seconds.add_metric([model], buckets, float(row[_SUM]))
    connections = CounterMetricFamily(
        "expertd_connection_refusals",
        "Input refused before it was a request to the application",
        labels=["status"],
    )
    for status, value in zip(CONNECTION_STATUSES, total[len(models) * _STRIDE :], strict=False):
        connections.add_metric([str(status)], float(value))
    yield from (requests, refusals, seconds, connections)


def request_outcomes(
    models: Sequence[str], cells: Iterable["memoryview[float]"]
) -> dict[str, tuple[Total, Total]]:
    """model -> its requests that succeeded, and those that failed, over the cells of all processes."""
    total = _summed(cells)
    outcomes = {}
    for place, model in enumerate(models):
        row = total[place * _STRIDE : (place + 1) * _STRIDE].tolist()
        succeeded, failed = Total(), Total()
        succeeded.add(int(row[_STATUS_PLACES[200]]), row[_SUM] - row[_FAILED])
        failed.add(int(sum(row[:_REASONS])) - succeeded.count, row[_FAILED])
        outcomes[model] = succeeded, failed
    return outcomes


def _summed(cells: Iterable["memoryview[float]"]) -> NDArray[np.float64]:
    total: NDArray[np.float64] = np.sum([np.array(each) for each in cells], axis=0)
    return total
