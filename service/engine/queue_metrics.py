"""The metrics of queues, which are read when Prometheus scrapes."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class QueueState(NamedTuple):
    """Of one model: what waits, and the chunks of long requests that steps have had."""

    num_requests: int
    num_tokens: int
    num_chunks: int


def queue_metrics(states: Mapping[str, QueueState]) -> Iterator[Metric]:
    """The state of each model's queue."""
    requests = GaugeMetricFamily("expertd_queue_requests", "Requests waiting", labels=["model"])
    tokens = GaugeMetricFamily("expertd_queue_tokens", "Tokens waiting", labels=["model"])
    chunks = CounterMetricFamily("expertd_chunks", "Parts of long requests in steps", labels=["model"])
    for model, state in states.items():
        requests.add_metric([model], state.num_requests)
        tokens.add_metric([model], state.num_tokens)
        chunks.add_metric([model], state.num_chunks)
    yield from (requests, tokens, chunks)
