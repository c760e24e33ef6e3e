"""From one placement to another: which experts move, in which rounds, and what is not worth it."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from expertd.service.moe.placement import (
    Placement,
    contiguous_placement,
    count_moves,
    global_placement,
    plan_change,
    relabel,
)
from expertd.service.moe.placement.changes import keep_slots
from expertd.service.moe.placement.rounds import rounds
from tests.service.moe.placement.greedy import by_rank, draw, repeated


@pytest.mark.parametrize(
    ("loads", "before", "moves"),
    [([26.0, 26, 26, 22], 1.04, 0), ([30.0, 30, 20, 20], 1.2, 2), ([1.0, 1, 0, 0], 2.0, 2)],
)
def test_a_layer_that_gains_less_than_5_percent_stays(loads: list[float], before: float, moves: int) -> None:
    old = contiguous_placement(4, 2)
    change = plan_change(old, global_placement(loads, 2, 4), loads)
    assert change.before == pytest.approx(before)
    assert change.after == pytest.approx(1.0 if moves else before)
    assert change.worthwhile == (moves > 0)
    assert change.moves == count_moves(old, change.placement) == moves


@pytest.mark.parametrize("max_moves", [0, 1, 2, 5, 20, 80])
@pytest.mark.parametrize("name", ["lognormal", "zipf 1.0"])
def test_no_more_experts_move_than_allowed(name: str, max_moves: int) -> None:
    for seed in range(12):
        loads = draw(name, np.random.default_rng(seed), 64)
        old = contiguous_placement(64, 8, 72)
        change = plan_change(old, global_placement(loads, 8, 72), loads, max_moves=max_moves)
        assert change.moves == count_moves(old, change.placement) <= max_moves, f"seed {seed}"
        assert change.after <= 0.95 * change.before or change.after == change.before, f"seed {seed}"
        assert change.worthwhile == (change.after < change.before), f"seed {seed}"
        assert change.worthwhile or max_moves < 5, f"seed {seed}"
        assert repeated(change.placement) == 0, f"seed {seed}"


def test_few_moves_bring_no_expert_to_a_rank_twice() -> None:
    for seed in range(40):
        rng = np.random.default_rng(seed)
        old, loads = global_placement(draw("pareto 1.2", rng, 12), 4, 16), draw("pareto 1.2", rng, 12)
        new = global_placement(loads, 4, 16)
        change = plan_change(old, new, loads, max_moves=5)
        assert repeated(change.placement) <= max(repeated(old), repeated(new)), f"seed {seed}"


def test_few_moves_are_the_ones_that_gain_most() -> None:
    # Zipf 1.0 over 64 experts on 2 ranks, and 256 on 4: eight moves suffice for the goal of 1.05.
    for num_experts, num_ranks in ((64, 2), (256, 4)):
        for seed in range(5):
            loads = draw("zipf 1.0", np.random.default_rng(seed), num_experts)
            old = contiguous_placement(num_experts, num_ranks, num_experts + 32)
            new = global_placement(loads, num_ranks, num_experts + 32)
            change = plan_change(old, new, loads, max_moves=8)
            assert change.after <= 1.05 or not change.worthwhile, f"seed {seed}: {change.after}"


def test_the_unit_of_loads_does_not_matter() -> None:
    loads = draw("zipf 1.0", np.random.default_rng(0), 64)
    old, new = contiguous_placement(64, 8, 72), global_placement(loads, 8, 72)
    one, huge = (plan_change(old, new, loads * unit, max_moves=8) for unit in (1.0, 2.0**1023))
    assert (one.placement.physical_to_logical == huge.placement.physical_to_logical).all()
    assert one.worthwhile


def test_several_small_changes_reach_balance() -> None:
    loads = draw("zipf 1.0", np.random.default_rng(0), 64)
    new = global_placement(loads, 8, 72)
    placement = contiguous_placement(64, 8, 72)
    for _ in range(40):
        change = plan_change(placement, new, loads, max_moves=8)
        if not change.worthwhile:
            break
        assert change.after < change.before
        placement = change.placement
    assert placement.imbalance(loads) < 1.08


def test_a_plan_that_fits_is_carried_out_whole() -> None:
    loads = draw("zipf 1.0", np.random.default_rng(0), 64)
    old, new = contiguous_placement(64, 8, 72), global_placement(loads, 8, 72)
    whole = plan_change(old, new, loads)
    bounded = plan_change(old, new, loads, max_moves=whole.moves)
    assert (bounded.placement.physical_to_logical == whole.placement.physical_to_logical).all()
    assert by_rank(whole.placement) != by_rank(old)
    assert sorted(by_rank(whole.placement)) == sorted(by_rank(new))


def test_placements_of_different_sizes_are_refused() -> None:
    old = contiguous_placement(8, 2, 10)
    for name, new in (
        ("num_experts", contiguous_placement(9, 2, 10)),
        ("num_ranks", contiguous_placement(8, 5, 10)),
        ("num_physical", contiguous_placement(8, 2, 8)),
    ):
        expected = f"^{name}: expected {getattr(old, name)}, got {getattr(new, name)}$"
        for change in (count_moves, relabel):
            with pytest.raises(ValueError, match=expected):
                change(old, new)
        with pytest.raises(ValueError, match=expected):
            plan_change(old, new, np.ones(8))


def of_ranks(*ranks: list[int], num_experts: int) -> Placement:
    """A placement by the experts of each rank."""
    return Placement(np.concatenate(ranks), num_experts, len(ranks))


def test_only_experts_that_a_rank_lacks_move() -> None:
    old = of_ranks([0, 1, 2], [3, 4, 0], num_experts=5)
    assert count_moves(old, old) == 0
    assert count_moves(old, of_ranks([2, 0, 1], [0, 4, 3], num_experts=5)) == 0
    assert count_moves(old, of_ranks([0, 1, 4], [3, 2, 2], num_experts=5)) == 3
    assert count_moves(old, of_ranks([0, 1, 1], [3, 4, 2], num_experts=5)) == 1


def test_renumbered_ranks_keep_their_experts_and_slots() -> None:
    old = of_ranks([0, 1, 2], [3, 4, 5], [6, 7, 0], num_experts=8)
    new = of_ranks([6, 0, 7], [2, 0, 3], [5, 1, 4], num_experts=8)
    found = relabel(old, new)
    assert found.physical_to_logical.tolist() == [0, 3, 2, 1, 4, 5, 6, 7, 0]
    assert count_moves(old, found) == 2


def test_few_ranks_are_renumbered_as_well_as_possible() -> None:
    for seed in range(30):
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
        # Only ranks of equally many of_ranks can take each other's place.
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


def random_placement(random: np.random.Generator, experts: int, physical: int, ranks: int) -> Placement:
    spare = random.integers(0, experts, physical - experts)
    return Placement(random.permutation(np.append(np.arange(experts), spare)), experts, ranks)


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
    assert by_rank(last) == by_rank(new)
    kept = keep_slots(old, new)
    assert (
        sum(len(each.fetches) for each in made) == (old.physical_to_logical != kept.physical_to_logical).sum()
    )
    assert by_rank(kept) == by_rank(new)


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
