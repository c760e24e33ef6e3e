"""The metrics of placements, which are read when Prometheus scrapes."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from expertd.service.engine.collectors import count
from expertd.service.engine.placement import Placements


def placement_metrics(placements: Placements | None) -> Iterator[Metric]:
    """Load by rank, max/mean, moves and their seconds for each model; nothing without placements."""
    if placements is None:
        return
    loads = GaugeMetricFamily(
        "expertd_rank_load", "Recent load of the rank's experts", labels=["model", "rank"]
    )
    imbalance = GaugeMetricFamily(
        "expertd_rank_imbalance_ratio", "Largest load of a rank, divided by the mean", labels=["model"]
    )
    moves = CounterMetricFamily("expertd_placement_moves", "Experts that moved", labels=["model"])
    seconds = CounterMetricFamily(
        "expertd_placement_move_seconds", "Time in which experts moved", labels=["model"]
    )
    for model, state in placements.states().items():
        for rank, load in enumerate(state.rank_loads):
            loads.add_metric([model, str(rank)], load)
        imbalance.add_metric([model], state.imbalance)
        moves.add_metric([model], state.moves)
        seconds.add_metric([model], state.move_seconds)
    yield from (loads, imbalance, moves, seconds)
    yield count("expertd_placement_failures", "Changes that did not end", placements.failures)
