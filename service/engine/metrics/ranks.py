"""The metrics of ranks and of the placement of experts on them; imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import NamedTuple

from prometheus_client.core import Metric

from expertd.service.engine.metrics.family import MetricFamily, samples
from expertd.service.engine.placement import Placements
from expertd.service.moe.step.step_counts import StoreCounts

_LABELS, _WHEN = ("rank",), "with several ranks"


def _gauge(name: str, text: str, unit: str, needs_gpu: bool = False) -> MetricFamily:
    return MetricFamily("gauge", f"rank_{name}", text, unit, _LABELS, needs_gpu=needs_gpu, when=_WHEN)


def _counter(name: str, text: str, unit: str, when: str = _WHEN) -> MetricFamily:
    return MetricFamily("counter", f"rank_{name}", text, unit, _LABELS, when=when)


def _of_stores(name: str, text: str, unit: str) -> MetricFamily:
    when = f"{_WHEN} and `weights_budget`, if it is smaller than a rank's experts"
    return _counter(f"expert_store_{name}", text, unit, when)


_GAUGES = (
    _gauge("up", "1 when the rank is ready", ""),
    _gauge("device_memory_used_bytes", "memory in use on the rank's GPU", "bytes", needs_gpu=True),
    _gauge("device_memory_total_bytes", "total memory of the rank's GPU", "bytes", needs_gpu=True),
)
_COUNTERS = (
    _counter("starts", "starts of the rank", "starts"),
    _counter("compute_seconds", "time in steps", "seconds"),
    _counter("expert_tokens", "tokens computed by the rank's experts", "tokens"),
    _counter("jit_compilations", "kernels compiled by the rank's present process", "kernels"),
    _counter("jit_compile_seconds", "time that this process spent compiling kernels", "seconds"),
    _counter("jit_cache_hits", "compiled kernels that this process found in the cache", "kernels"),
)
_STORE_COUNTERS = (  # in the order of `StoreCounts`
    _of_stores("hits", "the rank's part of `expertd_expert_store_hits_total`, of all models", "experts"),
    _of_stores("misses", "its part of `expertd_expert_store_misses_total`", "experts"),
    _of_stores("copy_bytes", "its part of `expertd_expert_store_copy_bytes_total`", "bytes"),
    _of_stores("wait_seconds", "its part of `expertd_expert_store_wait_seconds_total`", "seconds"),
)


class RankDevice(NamedTuple):
    """A rank's device and kernels, as its process says from time to time.

    memory        (used, total) bytes; None for a CPU
    compilations  of kernels, with their compile_seconds and cache_hits, since the process started
    uuid          of a GPU
    """

    memory: tuple[int, int] | None = None
    compilations: int = 0
    compile_seconds: float = 0.0
    cache_hits: int = 0
    uuid: str = ""


class RankState(NamedTuple):
    """A rank: whether it is ready; its starts, seconds in steps and experts' tokens so far; its device; what
    its stores of experts have done, None: nothing, or there is none.
    """

    is_up: bool
    starts: int
    compute_seconds: float
    expert_tokens: int
    device: RankDevice = RankDevice()
    stores: StoreCounts | None = None


def rank_metrics(states: Sequence[RankState]) -> Iterator[Metric]:
    """The metrics of all ranks; none without ranks."""
    if not states:
        return
    rows: dict[str, tuple[float | None, ...]] = {}
    for rank, (is_up, starts, seconds, tokens, device, stores) in enumerate(states):
        memory = device.memory or (None, None)
        of_stores = (None,) * len(_STORE_COUNTERS) if stores is None else astuple(stores)
        rows[str(rank)] = is_up, *memory, starts, seconds, tokens, *device[1:4], *of_stores
    for index, family in enumerate((*_GAUGES, *_COUNTERS, *_STORE_COUNTERS)):
        values = {rank: value for rank, row in rows.items() if (value := row[index]) is not None}
        if values:
            yield from samples(family, values)


_POLICY = "with `placement.policy`"
LOADS = MetricFamily(
    "gauge", "rank_load", "recent load of the rank's experts", "", ("model", "rank"), when=_POLICY
)
IMBALANCE = MetricFamily(
    "gauge",
    "rank_imbalance_ratio",
    "the largest load of a rank divided by the mean",
    "ratio",
    ("model",),
    when=_POLICY,
)
MOVES = MetricFamily(
    "counter", "placement_moves", "experts that moved to a rank", "experts", ("model",), when=_POLICY
)
MOVE_SECONDS = MetricFamily(
    "counter",
    "placement_move_seconds",
    "time in which experts moved",
    "seconds",
    ("model",),
    when=_POLICY,
)
FAILURES = MetricFamily(
    "counter",
    "placement_failures",
    "changes of a placement that had begun and ended early, because a rank was lost or for an error in the "
    "log; those refused with 4xx or 503 do not count",
    "changes",
    when=_POLICY,
)
FAMILIES = (*_GAUGES, *_COUNTERS, *_STORE_COUNTERS, LOADS, IMBALANCE, MOVES, MOVE_SECONDS, FAILURES)


def placement_metrics(placements: Placements | None) -> Iterator[Metric]:
    """Load by rank, max/mean, moves and their seconds for each model; nothing without placements."""
    if placements is None:
        return
    states = placements.states()
    loads = {
        (model, str(rank)): load for model in states for rank, load in enumerate(states[model].rank_loads)
    }
    yield from samples(LOADS, loads)
    yield from samples(IMBALANCE, {model: state.imbalance for model, state in states.items()})
    yield from samples(MOVES, {model: state.moves for model, state in states.items()})
    yield from samples(MOVE_SECONDS, {model: state.move_seconds for model, state in states.items()})
    yield FAILURES.counter(placements.failures)
