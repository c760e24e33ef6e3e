"""The counts of a histogram, to which many values are added at once."""

import numpy as np
from numpy.typing import ArrayLike, NDArray
from prometheus_client.core import HistogramMetricFamily

from expertd.service.engine.metric_family import Family


class Tally:
    """One series of a histogram."""

    def __init__(self, family: Family) -> None:
        self._bounds = np.array(family.buckets)
        self._names = [*map(str, family.buckets), "+Inf"]
        self._counts: NDArray[np.int64] = np.zeros(len(family.buckets) + 1, np.int64)
        self._sum = 0.0

    def add(self, values: ArrayLike) -> None:
        """Count values of any shape."""
        given = np.asarray(values, np.float64).ravel()
        places = np.searchsorted(self._bounds, given)
        self._counts = self._counts + np.bincount(places, minlength=len(self._counts))
        self._sum += float(given.sum())

    def add_to(self, family: HistogramMetricFamily, *labels: str) -> None:
        """Show the series in a scrape."""
        buckets = list(zip(self._names, np.cumsum(self._counts).tolist(), strict=True))
        family.add_metric(labels, buckets, self._sum)
