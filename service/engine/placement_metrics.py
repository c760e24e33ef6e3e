"""The metrics of placements, which are read when Prometheus scrapes."""

from collections.abc import Iterator

from prometheus_client.core import Metric

from expertd.service.engine.metric_family import Family
from expertd.service.engine.placement import Placements

_WHEN = "with `placement.policy`"
LOADS = Family("gauge", "rank_load", "recent load of the rank's experts", "", ("model", "rank"), when=_WHEN)
IMBALANCE = Family(
    "gauge",
    "rank_imbalance_ratio",
    "the largest load of a rank divided by the mean",
    "ratio",
    ("model",),
    when=_WHEN,
)
MOVES = Family(
    "counter", "placement_moves", "experts that moved to a rank", "experts", ("model",), when=_WHEN
)
SECONDS = Family(
    "counter", "placement_move_seconds", "time in which experts moved", "seconds", ("model",), when=_WHEN
)
FAILURES = Family(
    "counter",
    "placement_failures",
    "changes of a placement that had begun and ended early, because a rank was lost or for an error in the "
    "log; those refused with 4xx or 503 do not count",
    "changes",
    when=_WHEN,
)
FAMILIES = (LOADS, IMBALANCE, MOVES, SECONDS, FAILURES)


def placement_metrics(placements: Placements | None) -> Iterator[Metric]:
    """Load by rank, max/mean, moves and their seconds for each model; nothing without placements."""
    if placements is None:
        return
    loads, imbalance = LOADS.gauge(), IMBALANCE.gauge()
    moves, seconds = MOVES.counter(), SECONDS.counter()
    for model, state in placements.states().items():
        for rank, load in enumerate(state.rank_loads):
            loads.add_metric([model, str(rank)], load)
        imbalance.add_metric([model], state.imbalance)
        moves.add_metric([model], state.moves)
        seconds.add_metric([model], state.move_seconds)
    yield from (loads, imbalance, moves, seconds)
    yield FAILURES.counter(placements.failures)
