"""Metrics as of a server that has everything, for tests of what reads them."""

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace

from expertd.device_calls import CallCounts
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.device import (
    GpuSensors,
    call_metrics,
    memory_metrics,
    store_metrics,
    use_metrics,
)
from expertd.service.engine.metrics.ranks import RankDevice, RankState, placement_metrics
from expertd.service.engine.metrics.steps import QueueState, lane_queue_metrics, queue_metrics
from expertd.service.engine.placement import PlacementState
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.step.step_counts import HostCopies, Launches, StepUse, StoreCounts

SHAPE = LayerShape(128, 128, 4, 2)


class Given:
    """The placement of a layer on two ranks."""

    policy, objective, is_moving, failures = "static", "tokens", False, 3

    def states(self) -> dict[str, PlacementState]:
        ranks = [[0, 1], [2, 0]]
        loads = [6.0, 1.0, 4.0], [4.0, 7.0]
        return {"tiny": PlacementState(ranks, [True, True], *loads, 7 / 5.5, False, None, 5, 0.25)}

    def rebalance(self, models: Sequence[str]) -> "Future[None]":
        raise AssertionError("metrics only read")

    def pin(self, model: str, ranks: Sequence[Sequence[int]]) -> "Future[None]":
        raise AssertionError("metrics only read")


def everything() -> Metrics:
    """Every metric there is: of lanes, ranks, placements and GPUs too, with the model "tiny"."""
    metrics = Metrics("0")
    metrics.add_models({"tiny": SHAPE}, 4, ["decode", "prefill"])
    metrics.watch_models(lambda: {"tiny": True})
    metrics.watch_jit(lambda: SimpleNamespace(compilations=1, compile_seconds=2.0, cache_hits=3))
    metrics.watch_partitions(lambda: (132, {"decode": 32}))
    metrics.watch_shared_memory(lambda: {"system": (1, 2), "cuda": (3, 4)})
    metrics.watch_channels(lambda: (1, 2))
    metrics.watch_buffered("engine", lambda: 1)
    device, of_rank = RankDevice((5, 9), 3, 1.5, 2, "GPU-a"), StoreCounts(1, 2, 3, 4.0)
    metrics.watch_ranks(lambda: [RankState(True, 1, 0.5, 10, device, of_rank)])
    metrics.watch(lambda: queue_metrics({"tiny": QueueState(1, 2, 3)}))
    stores = {"tiny": StoreCounts(1, 2, 3, 4.0)}
    use = StepUse({"tiny": Launches(1, 2, 3, 4)}, {"tiny": 5}, HostCopies(6, 7.0), {"weights": 8})
    metrics.watch(lambda: use_metrics(["tiny"], use))
    metrics.watch(lambda: store_metrics(stores))
    metrics.watch(lambda: memory_metrics((1, 2)))
    calls = map(CallCounts, *(itertools.count(first) for first in (1, 2, 3, 4)))  # more at each scrape
    metrics.watch(lambda: call_metrics(["tiny"], {"tiny": next(calls)}))
    metrics.watch(lambda: placement_metrics(Given()))
    metrics.watch(lambda: lane_queue_metrics({"decode": {"tiny": QueueState(1, 2, 3)}}))
    sensors = GpuSensors()
    metrics.watch(lambda: sensors.metrics(["GPU-a"]))
    return metrics
