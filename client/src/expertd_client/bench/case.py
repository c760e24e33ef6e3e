"""What is measured, and what came of it."""

import math
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from expertd_client.transport import TransportName


class BenchError(Exception):
    """Nothing can be measured, or no more."""


@dataclass(frozen=True)
class BenchTarget:
    """The server and the layer that all requests go to."""

    url: str
    transport: TransportName
    model: str
    hidden_size: int
    datatype: str
    timeout: float


@dataclass(frozen=True)
class Case:
    """`rate` requests/s in all with an open loop; None: a closed one."""

    tokens: int
    connections: int
    rate: float | None
    seconds: float
    warmup: float


@dataclass
class Sample:
    """What one process has seen of a case; times in seconds."""

    latencies: npt.NDArray[np.float64]
    late: npt.NDArray[np.float64]  # of an open loop: from when each request was due until it was sent
    errors: Counter[str]
    unsent: int
    seconds: float
    cpu_seconds: float


@dataclass(frozen=True)
class Result:
    """All of a case; latencies in microseconds. `errors` counts failed requests by their kind.

    `unsent` requests of an open loop were due, but no connection was free for them until `timeout` after
    the end. `client_cpu` is the share of a core that the busiest client process used.
    """

    tokens: int
    connections: int
    rate: float | None
    requests: int
    seconds: float
    requests_per_second: float
    tokens_per_second: float
    p50_us: float
    p90_us: float
    p99_us: float
    max_us: float
    mean_us: float
    late_p99_us: float
    unsent: int
    client_cpu: float
    processes: int
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """Requests without the right answer."""
        return self.unsent + sum(self.errors.values())

    def as_json(self) -> dict[str, Any]:
        """For a JSON file; null for latencies of nothing."""
        values = asdict(self)
        numbers = [entry.name for entry in fields(self) if isinstance(values[entry.name], float)]
        return values | {name: None for name in numbers if math.isnan(values[name])}


def summarize(case: Case, samples: list[Sample]) -> Result:
    """Join what all processes have seen."""
    latencies = np.concatenate([sample.latencies for sample in samples])
    late = np.concatenate([sample.late for sample in samples])
    seconds = max(sample.seconds for sample in samples)
    p50, p90, p99 = _percentiles(latencies, 50, 90, 99)
    errors: Counter[str] = sum((sample.errors for sample in samples), Counter())
    return Result(
        tokens=case.tokens,
        connections=case.connections,
        rate=case.rate,
        requests=len(latencies),
        seconds=seconds,
        requests_per_second=len(latencies) / seconds,
        tokens_per_second=len(latencies) * case.tokens / seconds,
        p50_us=p50,
        p90_us=p90,
        p99_us=p99,
        max_us=_percentiles(latencies, 100)[0],
        mean_us=float(latencies.mean()) * 1e6 if len(latencies) else math.nan,
        late_p99_us=_percentiles(late, 99)[0],
        unsent=sum(sample.unsent for sample in samples),
        client_cpu=max(sample.cpu_seconds / sample.seconds for sample in samples),
        processes=len(samples),
        errors=dict(errors),
    )


def _percentiles(seconds: npt.NDArray[np.float64], *percents: float) -> list[float]:
    """In microseconds; NaN if there are none."""
    if not len(seconds):
        return [math.nan] * len(percents)
    return [float(value) * 1e6 for value in np.percentile(seconds, percents)]
