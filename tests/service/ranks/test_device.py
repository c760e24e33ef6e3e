"""What ranks say of their devices and kernels, and the metrics that it becomes."""

from collections.abc import Iterator
from typing import Any

import pytest

from expertd.kernels.jit.statistics import JitStats
from expertd.service.engine.loading import Loaded
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.ranks import RankDevice, RankState
from expertd.service.ranks.worker import device
from tests.service.waiting import wait_for


def test_changes_are_told_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_SECONDS", 0.001)
    monkeypatch.setattr(device, "stats", lambda: JitStats(3, 1.5, 2))
    used: Iterator[int] = iter([5, 5, 5, 7])
    last = 7
    told: list[tuple[Any, ...]] = []
    loaded = Loaded(
        "fake", "fake", {}, None, lambda: (next(used, last), 9), lambda _: None, gpus=lambda: ["GPU-a"]
    )
    device.tell_changes(loaded, lambda *fields: told.append(fields))
    assert told[0] == ((5, 9), 3, 1.5, 2, "GPU-a"), "at once"
    wait_for(lambda: len(told) > 1, "the change is reported", 5)
    assert told[1] == ((7, 9), 3, 1.5, 2, "GPU-a")


def test_metrics_have_each_ranks_device() -> None:
    metrics = Metrics("1")
    states = [RankState(True, 1, 0.5, 10, RankDevice((5, 9), 3, 1.5, 2)), RankState(False, 2, 0.0, 0)]
    metrics.watch_ranks(lambda: states)
    value = metrics.registry.get_sample_value
    names = ("up", "device_memory_used_bytes", "device_memory_total_bytes", "starts_total")
    jit = ("jit_compilations_total", "jit_compile_seconds_total", "jit_cache_hits_total")
    got = [[value(f"expertd_rank_{name}", {"rank": rank}) for name in (*names, *jit)] for rank in "01"]
    assert got == [[1, 5, 9, 1, 3, 1.5, 2], [0, None, None, 2, 0, 0, 0]]
