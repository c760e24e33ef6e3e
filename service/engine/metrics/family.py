"""What is said of a metric once: its name, type, unit, labels and meaning. Its series are made from it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)

PREFIX = "expertd_"
# An expert layer takes tens of microseconds: 10 us to 42 s, by factors of 2.
SECONDS = tuple(round(10e-6 * 2**i, 6) for i in range(23))


@dataclass(frozen=True, eq=False)
class MetricFamily:
    """A metric.

    name       without `expertd_`, and for a counter without `_total`
    text       its meaning, for the table and for whoever reads /metrics
    unit       of its values
    labels     what tells its series from each other
    buckets    upper bounds of a histogram's buckets
    when       in which servers it exists; "": in every one
    needs_gpu  whether only on a GPU
    """

    kind: Literal["counter", "gauge", "histogram", "info"]
    name: str
    text: str
    unit: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    when: str = ""
    needs_gpu: bool = False

    @property
    def full_name(self) -> str:
        """As prometheus_client knows it."""
        return f"{PREFIX}{self.name}"

    @property
    def shown_name(self) -> str:
        """As PromQL knows it; a histogram's series have suffixes beside."""
        return self.full_name + {"counter": "_total", "info": "_info"}.get(self.kind, "")

    @property
    def where(self) -> str:
        """Where it exists, in words; "": in every server."""
        return ", ".join(filter(None, ("on a GPU" if self.needs_gpu else "", self.when)))

    def gauge(self, value: float | None = None) -> GaugeMetricFamily:
        """A gauge for one scrape; `value` is that of its only series."""
        assert self.kind == "gauge"
        labels = None if value is not None else self.labels
        return GaugeMetricFamily(self.full_name, self.text, value=value, labels=labels)

    def counter(self, value: float | None = None) -> CounterMetricFamily:
        """A counter for one scrape; `value` is that of its only series."""
        assert self.kind == "counter"
        labels = None if value is not None else self.labels
        return CounterMetricFamily(self.full_name, self.text, value=value, labels=labels)

    def histogram(self) -> HistogramMetricFamily:
        """A histogram for one scrape."""
        assert self.kind == "histogram"
        return HistogramMetricFamily(self.full_name, self.text, labels=self.labels)

    def info(self, values: dict[str, str]) -> InfoMetricFamily:
        """What is always 1; `values` has its labels."""
        assert self.kind == "info"
        return InfoMetricFamily(self.full_name, self.text, values)


def samples(
    family: MetricFamily, values: Mapping[str, float] | Mapping[tuple[str, str], float]
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """A gauge or counter with a series for each key of `values`: the value of its label, or of both."""
    metric = family.counter() if family.kind == "counter" else family.gauge()
    for labels, value in values.items():
        metric.add_metric([labels] if isinstance(labels, str) else labels, value)
    yield metric


class HistogramCounts:
    """One series of a histogram."""

    def __init__(self, family: MetricFamily) -> None:
        self._bounds = np.array(family.buckets)
        self._names = [*map(str, family.buckets), "+Inf"]
        self._counts: NDArray[np.int64] = np.zeros(len(family.buckets) + 1, np.int64)
        self._sum = 0.0

    def add(self, values: ArrayLike) -> None:
        """Count values of any shape."""
        given = np.asarray(values, np.float64).ravel()
        indices = np.searchsorted(self._bounds, given)
        self._counts = self._counts + np.bincount(indices, minlength=len(self._counts))
        self._sum += float(given.sum())

    def add_to(self, family: HistogramMetricFamily, *labels: str) -> None:
        """Show the series in a scrape."""
        buckets = list(zip(self._names, np.cumsum(self._counts).tolist(), strict=True))
        family.add_metric(labels, buckets, self._sum)
