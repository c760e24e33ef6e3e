"""Which experts move from one placement to another, and ranks renumbered so that few do."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from expertd.service.moe.placement import (
    Placement,
    count_moves,
    global_placement,
    relabel,
)
from tests.service.moe.placement.greedy import by_rank, draw


def slots(*ranks: list[int], num_experts: int) -> Placement:
    """A placement by the experts of each rank."""
    return Placement(np.concatenate(ranks), num_experts, len(ranks))


def test_only_experts_that_a_rank_lacks_move() -> None:
    old = slots([0, 1, 2], [3, 4, 0], num_experts=5)
    assert count_moves(old, old) == 0
    assert count_moves(old, slots([2, 0, 1], [0, 4, 3], num_experts=5)) == 0
    assert count_moves(old, slots([0, 1, 4], [3, 2, 2], num_experts=5)) == 3
    assert count_moves(old, slots([0, 1, 1], [3, 4, 2], num_experts=5)) == 1


def test_renumbered_ranks_keep_their_experts_and_slots() -> None:
    old = slots([0, 1, 2], [3, 4, 5], [6, 7, 0], num_experts=8)
    new = slots([6, 0, 7], [2, 0, 3], [5, 1, 4], num_experts=8)
    found = relabel(old, new)
    assert found.physical_to_logical.tolist() == [0, 3, 2, 1, 4, 5, 6, 7, 0]
    assert count_moves(old, found) == 2


def test_few_ranks_are_renumbered_as_well_as_possible() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        old, new = (global_placement(draw("lognormal", rng, 12), 4, 16) for _ in range(2))
        ranks = new.physical_to_logical.reshape(4, 4)
        every = (ranks[list(order)].ravel() for order in permutations(range(4)))
        best = min(count_moves(old, replace(new, physical_to_logical=order)) for order in every)
        found = relabel(old, new)
        assert count_moves(old, found) == best, f"seed {seed}"
        assert sorted(by_rank(found)) == sorted(by_rank(new))


@pytest.mark.parametrize(("num_ranks", "num_physical"), [(32, 288), (7, 290), (1, 260)])
def test_a_shuffled_placement_is_recognised(num_ranks: int, num_physical: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(6):
        old = global_placement(draw("lognormal", rng, 256), num_ranks, num_physical)
        spare = num_physical % num_ranks
        ranks = [old.experts_of_rank(rank) for rank in range(num_ranks)]
        # Only ranks of equally many slots can take each other's place.
        order = [*rng.permutation(spare), *(spare + rng.permutation(num_ranks - spare))]
        shuffled = np.concatenate([rng.permutation(ranks[rank]) for rank in order])
        found = relabel(old, replace(old, physical_to_logical=shuffled))
        assert count_moves(old, found) == 0
        assert (found.physical_to_logical == old.physical_to_logical).all()


def test_ranks_of_different_sizes_keep_them() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        old, new = (global_placement(draw("lognormal", rng, 9), 4, 11) for _ in range(2))
        ours = by_rank(relabel(old, new))
        assert sorted(ours) == sorted(by_rank(new)), f"seed {seed}"
        assert [len(rank) for rank in ours] == [3, 3, 3, 2]
