"""The metrics of lanes whose split the server chooses."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from expertd.service.engine.lane_choice import Expected, Reason
from expertd.service.engine.metric_family import Family

_WHEN = "with `lanes.decode_p99_ms`"
DECODE_SMS = Family("gauge", "lanes_decode_sms", "SMs of the decode lane; 0: joined", "SMs", when=_WHEN)
CHUNK_TOKENS = Family(
    "gauge", "lanes_chunk_tokens", "tokens of a chunk while joined; 0: no chunks", "tokens", when=_WHEN
)
DECODE_SECONDS = Family(
    "gauge",
    "lanes_expected_decode_seconds",
    "expected p99 of decode requests",
    "seconds",
    when=_WHEN,
)
MEASURED_SECONDS = Family(
    "gauge",
    "lanes_measured_decode_seconds",
    "what 99 of 100 decode requests took at most, in their queue and step, on their lane or joined, at "
    "the last sample with enough of them; 0: not known",
    "seconds",
    when=_WHEN,
)
PREFILL_RATIO = Family(
    "gauge",
    "lanes_expected_prefill_ratio",
    "prefill's expected rate over its rate alone",
    "ratio",
    when=_WHEN,
)
MEASURED_RATIO = Family(
    "gauge",
    "lanes_measured_prefill_ratio",
    "prefill's rate while there was some, over its rate alone, in the last sample with some; 0: not known",
    "ratio",
    when=_WHEN,
)
CHANGES = Family(
    "counter",
    "lanes_changes",
    "changes of the choice; reason: target (decode reaches its target), prefill (it gets faster), decode "
    "(it gets faster)",
    "changes",
    ("reason",),
    when=_WHEN,
)
FAMILIES = (
    DECODE_SMS, CHUNK_TOKENS, DECODE_SECONDS, MEASURED_SECONDS, PREFILL_RATIO, MEASURED_RATIO, CHANGES,
)  # fmt: skip


def control_metrics(
    expected: Expected, measured_seconds: float, measured_ratio: float, changes: Mapping[Reason, int]
) -> Iterator[Metric]:
    """The present choice, what it likely gives and gave, and how often it was changed for what reason."""
    yield DECODE_SMS.gauge(expected.choice.decode_sms)
    yield CHUNK_TOKENS.gauge(expected.choice.chunk_tokens)
    yield DECODE_SECONDS.gauge(expected.decode_seconds)
    yield MEASURED_SECONDS.gauge(measured_seconds)
    yield PREFILL_RATIO.gauge(expected.prefill_share)
    yield MEASURED_RATIO.gauge(measured_ratio)
    counter = CHANGES.counter()
    for reason, count in changes.items():
        counter.add_metric([reason], count)
    yield counter
