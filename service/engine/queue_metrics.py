"""The metrics of queues, which are read when Prometheus scrapes."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import Metric

from expertd.service.engine.metric_family import Family

REQUESTS = Family("gauge", "queue_requests", "requests that wait for their step", "requests", ("model",))
TOKENS = Family("gauge", "queue_tokens", "tokens that wait for their step", "tokens", ("model",))
CHUNKS = Family(
    "counter",
    "chunks",
    "chunks of long requests in steps; 0 as long as none has competed with others",
    "chunks",
    ("model",),
)
FAMILIES = (REQUESTS, TOKENS, CHUNKS)


class QueueState(NamedTuple):
    """Of one model: what waits, and the chunks of long requests that steps have had."""

    num_requests: int
    num_tokens: int
    num_chunks: int


def queue_metrics(states: Mapping[str, QueueState]) -> Iterator[Metric]:
    """The state of each model's queue."""
    requests, tokens, chunks = REQUESTS.gauge(), TOKENS.gauge(), CHUNKS.counter()
    for model, state in states.items():
        requests.add_metric([model], state.num_requests)
        tokens.add_metric([model], state.num_tokens)
        chunks.add_metric([model], state.num_chunks)
    yield from (requests, tokens, chunks)
