"""What ranks report and what becomes of it: loads for plans, slices of a move, metrics of devices."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from expertd.kernels.jit.statistics import JitStats
from expertd.service.engine.loading import LoadedLayers
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.ranks import RankDevice, RankState
from expertd.service.moe.placement.rounds import Fetch
from expertd.service.moe.step.step_counts import StoreCounts
from expertd.service.ranks.front.balancer import SliceSize
from expertd.service.ranks.messages import NO_STEP, MoveCommand, MoveKind, StepCommand, move_bytes
from expertd.service.ranks.placement import LoadWindow
from expertd.service.ranks.worker import device
from tests.service.waiting import wait_for


def tokens(*counts: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(counts, dtype=np.int64)


@pytest.mark.parametrize(
    ("activated", "first", "then"), [(False, [5, 2, 0], [2.5, 1, 8]), (True, [1, 1, 0], [0.5, 0.5, 1])]
)
def test_older_loads_count_less(activated: bool, first: list[float], then: list[float]) -> None:
    now = 100.0
    window = LoadWindow(3, 10.0, activated, lambda: now)
    assert window.loads().tolist() == [0, 0, 0]
    window.note([tokens(5, 0, 0), tokens(0, 2, 0)])
    assert window.loads().tolist() == first
    now += 10
    window.note([tokens(0, 0, 8), tokens(0, 0, 0)])
    assert window.loads().tolist() == then


def test_slices_take_half_a_millisecond() -> None:
    size = SliceSize()
    smallest = size.num_bytes
    for _ in range(20):  # 1 GB/s
        size.note(size.num_bytes, size.num_bytes / 1e9)
    assert size.num_bytes == 500_000
    size.note(size.num_bytes, 5e-3)  # a rank was late
    assert size.num_bytes == smallest
    size.note(size.num_bytes, 1e-9)
    assert size.num_bytes == 2 * smallest, "no more than twice as many at once"


def test_commands_arrive_as_they_were_sent() -> None:
    command = MoveCommand(
        7, 3, MoveKind.FETCH, [Fetch(1, 200, 9), Fetch(12, 0, 4)], 1 << 33, (1 << 33) + 5, 1 << 40
    )
    packed = command.packed()
    assert MoveCommand.unpacked(packed) == command
    assert len(packed) == move_bytes(2)
    assert packed.startswith(NO_STEP)
    assert not StepCommand(1, 0, []).packed().startswith(NO_STEP)


def test_changes_are_told_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_SECONDS", 0.001)
    monkeypatch.setattr(device, "stats", lambda: JitStats(3, 1.5, 2))
    used: Iterator[int] = iter([5, 5, 5, 7])
    last = 7
    told: list[tuple[Any, ...]] = []
    loaded = LoadedLayers(
        "fake", "fake", {}, None, lambda: (next(used, last), 9), lambda _: None, gpus=lambda: ["GPU-a"]
    )
    device.tell_changes(loaded, lambda *fields: told.append(fields))
    assert told[0] == ((5, 9), 3, 1.5, 2, "GPU-a"), "at once"
    wait_for(lambda: len(told) > 1, "the change is reported")
    assert told[1] == ((7, 9), 3, 1.5, 2, "GPU-a")


def test_metrics_have_each_ranks_device() -> None:
    metrics = Metrics("1")
    did = StoreCounts(4, 2, 600, 0.25)
    states = [RankState(True, 1, 0.5, 10, RankDevice((5, 9), 3, 1.5, 2), did), RankState(False, 2, 0.0, 0)]
    metrics.watch_ranks(lambda: states)
    value = metrics.registry.get_sample_value
    names = ("up", "device_memory_used_bytes", "device_memory_total_bytes", "starts_total")
    jit = ("jit_compilations_total", "jit_compile_seconds_total", "jit_cache_hits_total")
    got = [[value(f"expertd_rank_{name}", {"rank": rank}) for name in (*names, *jit)] for rank in "01"]
    assert got == [[1, 5, 9, 1, 3, 1.5, 2], [0, None, None, 2, 0, 0, 0]]
    stores = [
        f"expertd_rank_expert_store_{name}_total" for name in ("hits", "misses", "copy_bytes", "wait_seconds")
    ]
    got = [[value(name, {"rank": rank}) for name in stores] for rank in "01"]
    assert got == [[4, 2, 600, 0.25], [None] * 4]
