"""Metrics of this process's pools, for Prometheus. It needs prometheus_client: the extra `metrics`."""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from prometheus_client import REGISTRY, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.registry import Collector

from expertd_client.outcomes import OUTCOMES
from expertd_client.pool import STATES, failures, pools

_DIRECTORY = "PROMETHEUS_MULTIPROC_DIR"
_WRITE_SECONDS = 1.0
Values = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class PoolMetric:
    """A metric.

    name    without `expertd_pool_`, and for a counter without `_total`
    labels  what tells its series from each other
    text    its meaning, for docs/pool.md and for whoever reads /metrics
    merged  how the values of several processes make one
    """

    kind: Literal["counter", "gauge"]
    name: str
    labels: tuple[str, ...]
    text: str
    merged: Literal["sum", "max"] = "sum"

    @property
    def shown_name(self) -> str:
        """As PromQL knows it."""
        return f"expertd_pool_{self.name}{'_total' if self.kind == 'counter' else ''}"

    def metric(self, values: Values) -> Metric:
        """For one scrape, with a value for each of its labels' values."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        made = kind(self.shown_name, self.text, labels=self.labels)
        for labels, value in values.items():
            made.add_metric(labels, value)
        return made


SERVERS = PoolMetric(
    "gauge", "servers", ("server", "state"), "pools of the caller in which a server is up, draining or down"
)
CALLS = PoolMetric("counter", "calls", ("server", "outcome"), "calls to a server, by how they ended")
IN_FLIGHT = PoolMetric("gauge", "calls_in_flight", ("server",), "calls to a server that have no answer yet")
EXPECTED = PoolMetric(
    "gauge",
    "expected_seconds",
    ("server",),
    "time that a further call is expected to take at a server; 0 while that is unknown",
    "max",
)
FAILED = PoolMetric(
    "counter", "failed_calls", ("reason",), "calls that no server has answered, by the last outcome"
)
FAMILIES = (SERVERS, CALLS, IN_FLIGHT, EXPECTED, FAILED)


class PoolCollector(Collector):
    """For a registry: what this process's open pools know, of the servers that are in their lists now."""

    def collect(self) -> Iterator[Metric]:
        """All of `FAMILIES`."""
        for family, values in _values().items():
            yield family.metric(values)


def expose() -> None:
    """Show the pools in prometheus_client's own registry, or in its multiprocess mode, in that directory.

    To be called in each process, at any time. In multiprocess mode, a process that has ended leaves its last
    gauges there, as with prometheus_client's own.
    """
    directory = os.environ.get(_DIRECTORY)
    if directory is None:
        _register()
    else:
        _keep_writing(Path(directory), os.getpid())


@cache
def _register() -> None:
    REGISTRY.register(PoolCollector())


@cache
def _keep_writing(directory: Path, pid: int) -> None:
    """Each second, in a thread."""

    def write() -> None:
        while True:
            with suppress(OSError):  # the directory goes when its server ends
                write_files(directory, pid)
            time.sleep(_WRITE_SECONDS)

    threading.Thread(target=write, name="expertd-metrics", daemon=True).start()


def write_files(directory: Path, pid: int) -> None:
    """Replace this process's files for a MultiProcessCollector by ones with the series of now.

    prometheus_client's own metrics would keep the series of servers that have gone.
    """
    by_file: dict[str, list[Metric]] = defaultdict(list)
    for family, values in _values().items():
        prefix = "counter" if family.kind == "counter" else f"gauge_{family.merged}"
        by_file[f"{prefix}_{pid}-expertd"].append(family.metric(values))
    for name, metrics in by_file.items():
        new = directory / f"{name}.new"
        new.unlink(missing_ok=True)
        file = MmapedDict(str(new))
        for metric in metrics:
            for sample in metric.samples:
                labels = list(sample.labels), list(sample.labels.values())
                key = mmap_key(metric.name, sample.name, *labels, metric.documentation)
                file.write_value(key, sample.value, 0.0)
        file.close()
        new.replace(directory / f"{name}.db")


def _values() -> dict[PoolMetric, Values]:
    """Of all families, by the values of their labels, in which pools with the same server are added up."""
    found: dict[PoolMetric, Values] = {family: defaultdict(float) for family in FAMILIES}
    for pool in pools():
        for server in pool.states():
            url = server.url
            for state in STATES:
                found[SERVERS][url, state] += state == server.state
            for outcome in OUTCOMES:
                found[CALLS][url, outcome] += server.ended.get(outcome, 0)
            found[IN_FLIGHT][url,] += server.calls
            found[EXPECTED][url,] = max(found[EXPECTED][url,], server.seconds)
    failed = failures()
    for reason in OUTCOMES[1:]:
        found[FAILED][reason,] = failed.get(reason, 0)
    return found
