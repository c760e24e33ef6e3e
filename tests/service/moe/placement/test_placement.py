"""A placement's maps, its helpers, and the static placement."""

from typing import Any

import numpy as np
import pytest

from expertd.service.moe.placement import Placement, contiguous_placement
from expertd.service.moe.split import experts_of_rank

# Four experts on three ranks, with 3, 2 and 2 slots.
SLOTS = [0, 1, 2, 3, 0, 1, 0]


def test_ranks_hold_slots_in_order() -> None:
    placement = Placement(np.array(SLOTS), 4, 3)
    assert placement.num_replicas.tolist() == [3, 2, 1, 1]
    assert [placement.slots_of_rank(rank) for rank in range(3)] == [slice(0, 3), slice(3, 5), slice(5, 7)]
    assert [placement.experts_of_rank(rank).tolist() for rank in range(3)] == [[0, 1, 2], [3, 0], [1, 0]]
    assert placement.rank_of_slot().tolist() == [0, 0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("slots", "loads", "by_rank"),
    [
        (SLOTS, [9.0, 4.0, 1.0, 1.0], [6.0, 4.0, 5.0]),
        ([3, 3, 3, 0, 1, 2, 3], [0.0, 0, 0, 8], [6.0, 0.0, 2.0]),
    ],
)
def test_replicas_share_an_experts_load_equally(
    slots: list[int], loads: list[float], by_rank: list[float]
) -> None:
    placement = Placement(np.array(slots), 4, 3)
    assert placement.load_by_rank(loads).tolist() == by_rank
    assert placement.imbalance(loads) == pytest.approx(6 / (sum(by_rank) / 3))


def test_imbalance_of_no_load_is_1_and_of_huge_loads_finite() -> None:
    placement = contiguous_placement(4, 2)
    assert placement.imbalance([0.0] * 4) == 1.0
    assert placement.imbalance([1e308, 1e308, 1e308, 0.0]) == 4 / 3


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ((8, 2, None), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ((7, 3, None), [[0, 1, 2], [3, 4], [5, 6]]),
        ((2, 3, None), [[0], [1], []]),
        ((7, 3, 9), [[0, 1, 2], [3, 4, 5], [5, 6, 0]]),
        ((4, 2, 8), [[0, 1, 2, 3], [2, 3, 0, 1]]),
    ],
)
def test_the_static_placement_has_experts_in_order(
    sizes: tuple[int, int, int | None], ranks: list[list[int]]
) -> None:
    num_experts, num_ranks, num_physical = sizes
    placement = contiguous_placement(num_experts, num_ranks, num_physical)
    assert [placement.experts_of_rank(rank).tolist() for rank in range(num_ranks)] == ranks


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 2), (7, 3), (256, 32), (10, 4)])
def test_the_static_placement_is_the_contiguous_split_of_layers(num_experts: int, num_ranks: int) -> None:
    placement = contiguous_placement(num_experts, num_ranks)
    for rank in range(num_ranks):
        part = experts_of_rank(range(num_experts), rank, num_ranks)
        assert placement.experts_of_rank(rank).tolist() == list(part)


@pytest.mark.parametrize(
    ("slots", "sizes", "message"),
    [
        ([0, 1, 2], (4, 1), "physical_to_logical: expected every expert, got no expert 3"),
        ([0, 4], (4, 1), "physical_to_logical: expected experts 0 to 3, got 0 to 4"),
        ([-1, 1], (4, 1), "physical_to_logical: expected experts 0 to 3, got -1 to 1"),
        ([[0, 1]], (2, 1), r"physical_to_logical: expected integers \[.*\], got int64 \[1, 2\]"),
        ([0.0], (1, 1), r"physical_to_logical: expected integers \[.*\], got float64 \[1\]"),
        ([], (1, 1), r"physical_to_logical: expected integers \[.*\], got float64 \[0\]"),
        ([0], (0, 1), "num_experts: expected at least 1, got 0"),
        ([0], (1, 0), "num_ranks: expected at least 1, got 0"),
    ],
)
def test_impossible_placements_are_refused(slots: Any, sizes: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Placement(np.array(slots), *sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 2, None), "num_experts: expected at least 1, got 0"),
        ((4, 0, None), "num_ranks: expected at least 1, got 0"),
        ((4, 2, 3), r"num_physical: expected at least num_experts \(4\), got 3"),
    ],
)
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int | None], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        contiguous_placement(*sizes)
