"""Metrics of an engine that are read at each scrape, unlike those that are counted as things happen."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from expertd.kernels.jit import stats as jit_stats
from expertd.service.engine.engine import Engine
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.device import call_metrics, memory_metrics, store_metrics, use_metrics
from expertd.service.engine.metrics.ranks import placement_metrics
from expertd.service.engine.metrics.steps import lane_queue_metrics, queue_metrics
from expertd.service.moe.step.step_counts import NOTHING


def watch(engine: Engine, metrics: Metrics) -> None:
    """Have `metrics` read them from now on, also while nothing is loaded."""
    metrics.watch_jit(jit_stats)
    metrics.watch_models(lambda: _ready_models(engine))
    metrics.watch(lambda: queue_metrics(engine.queue_states()))
    metrics.watch(lambda: _lane_metrics(engine))
    metrics.watch_partitions(engine.partition_sizes)
    metrics.watch_buffered("engine", lambda: engine.arena.used_bytes if engine.arena else 0)
    metrics.watch_shared_memory(engine.shared_memory.totals)
    metrics.watch_ranks(lambda: engine.loaded.ranks() if engine.loaded else ())
    metrics.watch(lambda: placement_metrics(engine.loaded.placements if engine.loaded else None))
    metrics.watch(lambda: _use_metrics(engine))
    metrics.watch(lambda: _call_metrics(engine))
    metrics.watch(engine.gpu_metrics)


def _ready_models(engine: Engine) -> dict[str, bool]:
    names = [name for name in engine.models if not engine.repository.is_unloaded(name)]
    return {name: engine.why_not_ready(name) is None for name in names}


def _lane_metrics(engine: Engine) -> Iterator[Metric]:
    if len(engine.executor.lanes) > 1:
        yield from lane_queue_metrics(engine.executor.queue_states(engine.models))


def _use_metrics(engine: Engine) -> Iterator[Metric]:
    use = engine.loaded.use() if engine.loaded else NOTHING
    if engine.settings.num_ranks == 1:
        yield from use_metrics(list(engine.models), use)
    yield from store_metrics(use.stores)
    yield from memory_metrics(engine.loaded.memory() if engine.loaded else None)


def _call_metrics(engine: Engine) -> Iterator[Metric]:
    if engine.loaded is not None and engine.loaded.calls is not None:
        yield from call_metrics(list(engine.models), engine.loaded.calls.counts())
