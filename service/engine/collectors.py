"""Metrics that are computed when Prometheus scrapes."""

from collections.abc import Callable, Iterable

import numpy as np
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class CallbackCollector(Collector):
    """Calls a function at every scrape."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        return self._collect()


class ExpertTokens(Collector):
    """Tokens by model and expert, summed as arrays because a step may use a thousand experts."""

    def __init__(self) -> None:
        self._totals: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}

    def add(self, model: str, tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> None:
        total = self._totals.get(model)
        # A new array each time, so that a scrape on another thread never sees a partial sum.
        self._totals[model] = tokens if total is None else total + tokens

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "expertd_expert_tokens", "Tokens computed by an expert", labels=["model", "expert"]
        )
        for model, total in list(self._totals.items()):
            for expert, tokens in enumerate(total.tolist()):
                family.add_metric([model, str(expert)], tokens)
        yield family


def count(name: str, text: str, value: float) -> Metric:
    """A counter without labels."""
    return CounterMetricFamily(name, text, value=value)
