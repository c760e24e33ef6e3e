"""What is counted for plans, how it decays, and how large the slices of a move are."""

import numpy as np
import pytest

from expertd.service.moe.placement.rounds import Fetch
from expertd.service.ranks.front.balancer import SliceSize
from expertd.service.ranks.messages import NO_STEP, Kind, MoveCommand, StepCommand, move_bytes
from expertd.service.ranks.placement import LoadWindow


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
        7, 3, Kind.FETCH, [Fetch(1, 200, 9), Fetch(12, 0, 4)], 1 << 33, (1 << 33) + 5, 1 << 40
    )
    packed = command.packed()
    assert MoveCommand.unpacked(packed) == command
    assert len(packed) == move_bytes(2)
    assert packed.startswith(NO_STEP)
    assert not StepCommand(1, 0, []).packed().startswith(NO_STEP)
