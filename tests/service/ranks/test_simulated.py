"""Balancing more ranks than a test can start: steps, loads, plans and rounds, without processes."""

import numpy as np
import pytest
from numpy.typing import NDArray

from expertd.service.moe.placement import (
    Placement,
    contiguous_placement,
    global_placement,
    plan_change,
)
from expertd.service.moe.placement.rounds import rounds
from expertd.service.ranks.placement import LoadWindow
from tests.service.moe.placement.greedy import chosen_replicas


def zipf(random: np.random.Generator, num_tokens: int, num_experts: int, top_k: int) -> NDArray[np.int64]:
    """Distinct experts of each token, number e with a weight of 1 / (e + 1)."""
    keys = random.gumbel(size=(num_tokens, num_experts)) - np.log(np.arange(1, num_experts + 1))
    return np.argsort(-keys, axis=1)[:, :top_k]


def tokens_by_rank(placement: Placement, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    chosen = chosen_replicas(placement, ids, np.arange(len(ids)))
    return np.bincount(placement.rank_of_slot()[chosen].ravel(), minlength=placement.num_ranks)


@pytest.mark.parametrize(("experts", "ranks", "top_k", "replicas"), [(64, 2, 4, 8), (256, 4, 8, 32)])
def test_ranks_get_equal_shares_of_skewed_steps(experts: int, ranks: int, top_k: int, replicas: int) -> None:
    random = np.random.default_rng(0)
    placement = contiguous_placement(experts, ranks, experts + replicas)
    window = LoadWindow(experts, 60.0, activated=False)
    steps = [zipf(random, 1024, experts, top_k) for _ in range(20)]
    for ids in steps:
        window.note([np.bincount(ids.ravel(), minlength=experts)])
    before = np.sum([tokens_by_rank(placement, ids) for ids in steps], axis=0)
    assert before.max() / before.mean() > 1.25
    loads = window.loads()
    change = plan_change(placement, global_placement(loads, ranks, experts + replicas), loads, max_moves=64)
    assert 0 < change.moves <= 64
    placement = rounds(placement, change.placement)[-1].placement
    fresh = np.sum([tokens_by_rank(placement, zipf(random, 1024, experts, top_k)) for _ in range(20)], axis=0)
    assert fresh.max() / fresh.mean() <= 1.05
