"""Metrics of placements, from states that a test gives."""

from collections.abc import Sequence
from concurrent.futures import Future

from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.ranks import placement_metrics
from expertd.service.engine.placement import PlacementState


class Given:
    """A layer on two ranks."""

    policy, objective, is_moving, failures = "static", "tokens", False, 3

    def states(self) -> dict[str, PlacementState]:
        ranks = [[0, 1], [2, 0]]
        loads = [6.0, 1.0, 4.0], [4.0, 7.0]
        return {"tiny": PlacementState(ranks, [True, True], *loads, 7 / 5.5, False, None, 5, 0.25)}

    def rebalance(self, models: Sequence[str]) -> "Future[None]":
        raise AssertionError("metrics only read")

    def pin(self, model: str, ranks: Sequence[Sequence[int]]) -> "Future[None]":
        raise AssertionError("metrics only read")


def test_loads_and_moves_are_reported() -> None:
    metrics = Metrics("0")
    before = {family.name for family in metrics.registry.collect()}
    metrics.watch(lambda: placement_metrics(Given()))
    assert {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.registry.collect()
        if family.name not in before
        for sample in family.samples
    } == {
        ("expertd_rank_load", "tiny", "0"): 4.0,
        ("expertd_rank_load", "tiny", "1"): 7.0,
        ("expertd_rank_imbalance_ratio", "tiny"): 7 / 5.5,
        ("expertd_placement_moves_total", "tiny"): 5,
        ("expertd_placement_move_seconds_total", "tiny"): 0.25,
        ("expertd_placement_failures_total",): 3,
    }


def test_a_fixed_placement_has_no_metrics() -> None:
    assert list(placement_metrics(None)) == []
