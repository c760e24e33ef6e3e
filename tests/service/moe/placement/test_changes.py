"""From one placement to another: which experts move, and which changes are not worth it."""

import numpy as np
import pytest

from expertd.service.moe.placement import (
    contiguous_placement,
    count_moves,
    global_placement,
    hierarchical_placement,
    plan_change,
    relabel,
)
from tests.service.moe.placement.greedy import by_rank, draw, repeated


def test_layers_that_gain_less_than_5_percent_stay() -> None:
    old = contiguous_placement(3, 4, 2)
    # max/mean of the static placement: 1.04, 1.2 and 2.
    loads = np.array([[26.0, 26, 26, 22], [30, 30, 20, 20], [1, 1, 0, 0]])
    change = plan_change(old, global_placement(loads, 2, 4), loads)
    assert (change.placement.physical_to_logical[0] == old.physical_to_logical[0]).all()
    assert change.before.tolist() == pytest.approx([1.04, 1.2, 2.0])
    assert change.after.tolist() == pytest.approx([1.04, 1.0, 1.0])
    assert change.worthwhile
    assert change.moves == count_moves(old, change.placement) == 4


def test_a_change_that_gains_too_little_is_not_worthwhile() -> None:
    loads = np.array([[26.0, 26, 26, 22]])
    old = contiguous_placement(1, 4, 2)
    change = plan_change(old, global_placement(loads, 2, 4), loads)
    assert not change.worthwhile
    assert change.moves == 0
    assert (change.placement.physical_to_logical == old.physical_to_logical).all()


def test_noise_moves_nothing() -> None:
    rng = np.random.default_rng(0)
    loads = draw("lognormal", rng, 58, 256)
    old = global_placement(loads, 32, 288)
    noisy = loads * rng.lognormal(sigma=0.02, size=loads.shape)
    assert not plan_change(old, global_placement(noisy, 32, 288), noisy).worthwhile


@pytest.mark.parametrize("max_moves", [0, 1, 2, 5, 20, 80])
@pytest.mark.parametrize("name", ["lognormal", "zipf 1.0"])
def test_no_more_experts_move_than_allowed(name: str, max_moves: int) -> None:
    for seed in range(3):
        loads = draw(name, np.random.default_rng(seed), 4, 64)
        old = contiguous_placement(4, 64, 8, 72)
        change = plan_change(old, global_placement(loads, 8, 72), loads, max_moves=max_moves)
        assert change.moves == count_moves(old, change.placement) <= max_moves, f"seed {seed}"
        changed = (change.placement.physical_to_logical != old.physical_to_logical).any(axis=1)
        assert (change.after[changed] <= 0.95 * change.before[changed]).all(), f"seed {seed}"
        assert (change.after[~changed] == change.before[~changed]).all(), f"seed {seed}"
        assert change.worthwhile == (max_moves > 0), f"seed {seed}"
        assert repeated(change.placement) == 0, f"seed {seed}"


def test_few_moves_bring_no_expert_to_a_rank_twice() -> None:
    for seed in range(100):
        rng = np.random.default_rng(seed)
        old, loads = global_placement(draw("pareto 1.2", rng, 1, 12), 4, 16), draw("pareto 1.2", rng, 1, 12)
        new = global_placement(loads, 4, 16)
        change = plan_change(old, new, loads, max_moves=5)
        assert repeated(change.placement) <= max(repeated(old), repeated(new)), f"seed {seed}"


def test_few_moves_are_the_ones_that_gain_most() -> None:
    # Zipf 1.0 over 64 experts on 2 ranks, and 256 on 4: eight moves suffice for the goal of 1.05.
    for num_experts, num_ranks in ((64, 2), (256, 4)):
        for seed in range(5):
            loads = draw("zipf 1.0", np.random.default_rng(seed), 1, num_experts)
            old = contiguous_placement(1, num_experts, num_ranks, num_experts + 32)
            new = global_placement(loads, num_ranks, num_experts + 32)
            change = plan_change(old, new, loads, max_moves=8)
            assert change.after[0] <= 1.05 or not change.worthwhile, f"seed {seed}: {change.after}"


def test_the_unit_of_loads_does_not_matter() -> None:
    loads = draw("zipf 1.0", np.random.default_rng(0), 2, 64)
    old, new = contiguous_placement(2, 64, 8, 72), global_placement(loads, 8, 72)
    one, huge = (plan_change(old, new, loads * unit, max_moves=8) for unit in (1.0, 2.0**1023))
    assert (one.placement.physical_to_logical == huge.placement.physical_to_logical).all()
    assert one.worthwhile


def test_several_small_changes_reach_balance() -> None:
    loads = draw("zipf 1.0", np.random.default_rng(0), 4, 64)
    new = global_placement(loads, 8, 72)
    placement = contiguous_placement(4, 64, 8, 72)
    for _ in range(40):
        change = plan_change(placement, new, loads, max_moves=8)
        if not change.worthwhile:
            break
        assert change.after.mean() < change.before.mean()
        placement = change.placement
    assert placement.imbalance(loads).max() < 1.08


def test_a_plan_that_fits_is_carried_out_whole() -> None:
    loads = draw("zipf 1.0", np.random.default_rng(0), 2, 64)
    old, new = contiguous_placement(2, 64, 8, 72), global_placement(loads, 8, 72)
    whole = plan_change(old, new, loads)
    bounded = plan_change(old, new, loads, max_moves=whole.moves)
    assert (bounded.placement.physical_to_logical == whole.placement.physical_to_logical).all()
    assert by_rank(whole.placement) != by_rank(old)
    assert [sorted(ranks) for ranks in by_rank(whole.placement)] == [sorted(r) for r in by_rank(new)]


def test_moves_that_were_too_few_for_many_layers_help_one() -> None:
    # In each of 30 layers two moves gain less than 5 %, so that 40 moves shared by all are worth nothing.
    rng = np.random.default_rng(3)
    loads = draw("lognormal", rng, 30, 256)
    old = global_placement(loads, 32, 288)
    loads = loads * rng.lognormal(sigma=0.1, size=loads.shape)
    change = plan_change(old, global_placement(loads, 32, 288), loads, max_moves=40)
    assert 2 < change.moves <= 40
    assert (change.after <= 0.95 * change.before).any()


def test_experts_stay_on_their_node_when_few_may_move() -> None:
    rng = np.random.default_rng(0)
    old = hierarchical_placement(draw("lognormal", rng, 3, 64), 8, 80, num_nodes=4, num_groups=8)
    loads = draw("lognormal", rng, 3, 64)
    new = hierarchical_placement(loads, 8, 80, num_nodes=4, num_groups=8)
    change = plan_change(old, new, loads, max_moves=10, num_nodes=4)
    assert change.worthwhile
    for layer in range(3):
        nodes = [set(n.tolist()) for n in old.physical_to_logical[layer].reshape(4, -1)]
        after = [set(n.tolist()) for n in change.placement.physical_to_logical[layer].reshape(4, -1)]
        assert after == nodes


def test_placements_of_different_sizes_are_refused() -> None:
    old = contiguous_placement(2, 8, 2, 10)
    for name, new in (
        ("num_layers", contiguous_placement(3, 8, 2, 10)),
        ("num_experts", contiguous_placement(2, 9, 2, 10)),
        ("num_ranks", contiguous_placement(2, 8, 5, 10)),
        ("num_physical", contiguous_placement(2, 8, 2, 8)),
    ):
        expected = f"^{name}: expected {getattr(old, name)}, got {getattr(new, name)}$"
        for change in (count_moves, relabel):
            with pytest.raises(ValueError, match=expected):
                change(old, new)
        with pytest.raises(ValueError, match=expected):
            plan_change(old, new, np.ones((2, 8)))


def test_impossible_limits_are_refused() -> None:
    old = contiguous_placement(1, 8, 4)
    with pytest.raises(ValueError, match=r"^max_moves: expected at least 0, got -1$"):
        plan_change(old, old, np.ones((1, 8)), max_moves=-1)
    for num_nodes in (0, 3):
        with pytest.raises(ValueError, match=rf"^num_nodes: expected a divisor of 4, got {num_nodes}$"):
            plan_change(old, old, np.ones((1, 8)), num_nodes=num_nodes)
    uneven = contiguous_placement(1, 9, 4)
    with pytest.raises(
        ValueError, match=r"^num_nodes: expected 1 where ranks hold different numbers, got 2$"
    ):
        relabel(uneven, uneven, num_nodes=2)
    with pytest.raises(ValueError, match=r"^loads: expected \[1, 8\], got \[1, 7\]$"):
        plan_change(old, old, np.ones((1, 7)))
