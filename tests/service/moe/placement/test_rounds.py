"""The way from one placement to another: complete at every round, within the memory of one more expert."""

import numpy as np
import pytest

from expertd.service.moe.placement import Placement, contiguous_placement, count_moves, global_placement
from expertd.service.moe.placement.changes import keep_slots
from expertd.service.moe.placement.rounds import rounds


def random_placement(random: np.random.Generator, experts: int, physical: int, ranks: int) -> Placement:
    spare = random.integers(0, experts, physical - experts)
    return Placement(random.permutation(np.append(np.arange(experts), spare)), experts, ranks)


def experts_by_rank(placement: Placement) -> list[list[int]]:
    return [sorted(placement.experts_of_rank(rank).tolist()) for rank in range(placement.num_ranks)]


@pytest.mark.parametrize("seed", range(60))
def test_every_round_has_a_complete_placement_and_one_fetch_a_rank(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks, experts = int(random.integers(1, 7)), int(random.integers(6, 20))
    physical = experts + int(random.integers(0, experts))
    old, new = (random_placement(random, experts, physical, ranks) for _ in range(2))
    held = old.physical_to_logical.copy()
    rank_of = old.rank_of_slot()
    made = rounds(old, new)
    for each in made:
        targets = [int(rank_of[fetch.slot]) for fetch in each.fetches]
        assert len(set(targets)) == len(targets) > 0
        assert all(held[fetch.source] == fetch.expert for fetch in each.fetches)
        for fetch in each.fetches:
            held[fetch.slot] = fetch.expert
        assert np.array_equal(held, each.placement.physical_to_logical)
        assert set(held.tolist()) == set(range(experts))
    last = made[-1].placement if made else old
    assert experts_by_rank(last) == experts_by_rank(new)
    kept = keep_slots(old, new)
    assert (
        sum(len(each.fetches) for each in made) == (old.physical_to_logical != kept.physical_to_logical).sum()
    )
    assert experts_by_rank(kept) == experts_by_rank(new)


def test_a_placement_that_stays_needs_no_round() -> None:
    placement = contiguous_placement(8, 2, 10)
    assert rounds(placement, placement) == []
    assert (
        rounds(placement, Placement(placement.physical_to_logical[[4, 1, 2, 3, 0, *range(5, 10)]], 8, 2))
        == []
    )


def test_no_more_experts_move_than_must() -> None:
    loads = 1.0 / np.arange(1, 65)
    old, new = contiguous_placement(64, 4, 72), global_placement(loads, 4, 72)
    made = rounds(old, new)
    assert sum(len(each.fetches) for each in made) == count_moves(old, new)
    assert len(made) < count_moves(old, new), "ranks fetch at the same time"


def test_placements_of_other_sizes_are_refused() -> None:
    old = contiguous_placement(8, 2)
    with pytest.raises(ValueError, match=r"^num_physical: expected 8, got 9$"):
        rounds(old, contiguous_placement(8, 2, 9))
