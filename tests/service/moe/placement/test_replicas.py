"""Which replica serves a token: the same on every rank, evenly spread, one by step for decode."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from expertd.service.moe.placement import (
    Placement,
    activation_frequencies,
    choose_replicas,
    contiguous_placement,
    global_placement,
)

# Expert 0 has three replicas, expert 1 two, expert 2 one.
PLACEMENT = Placement(np.array([[0, 1, 2, 0, 1, 0]]), 3, 3)


def test_a_replica_of_the_expert_is_chosen() -> None:
    topk_ids = np.random.default_rng(0).integers(-1, 3, size=(200, 2))
    chosen = choose_replicas(PLACEMENT, 0, topk_ids, np.arange(200))
    assert (chosen[topk_ids < 0] == -1).all()
    assert (PLACEMENT.physical_to_logical[0, chosen[topk_ids >= 0]] == topk_ids[topk_ids >= 0]).all()
    assert set(chosen.ravel().tolist()) == {-1, 0, 1, 2, 3, 4, 5}


def test_the_choice_is_the_documented_one() -> None:
    positions = [0, 1, 2, 1000, 2**32 + 5, 2**63 - 5]
    chosen = choose_replicas(PLACEMENT, 0, np.tile([0, 1, 2], (6, 1)), np.array(positions))
    for position, row in zip(positions, chosen.tolist(), strict=True):
        for expert, replica in enumerate(row):
            replicas = [slot for slot, held in enumerate([0, 1, 2, 0, 1, 0]) if held == expert]
            hashed = (position + expert) * 2654435769 % 2**32
            assert replica == replicas[len(replicas) * hashed // 2**32]


def test_the_choice_does_not_depend_on_the_other_tokens() -> None:
    topk_ids = np.random.default_rng(0).integers(0, 3, size=(64, 2))
    whole = choose_replicas(PLACEMENT, 0, topk_ids, np.arange(64))
    part = choose_replicas(PLACEMENT, 0, topk_ids[40:50, ::-1], np.arange(40, 50))
    assert (part[:, ::-1] == whole[40:50]).all()


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 7, 8, 16, 60, 64, 128, 256, 1024])
def test_tokens_are_spread_evenly_whatever_their_stride(stride: int) -> None:
    for count in range(2, 9):
        placement = Placement(np.array([[0] * count + [1]]), 2, 1)
        chosen = choose_replicas(placement, 0, np.zeros((2048, 1), dtype=int), np.arange(2048) * stride)
        tokens = np.bincount(chosen.ravel(), minlength=count)[:count]
        assert tokens.max() <= 1.05 * 2048 / count, tokens


def _activated(placement: Placement, topk_ids: NDArray[np.int64], positions: Any) -> NDArray[np.int64]:
    """Physical experts that got any token, by rank."""
    used = np.unique(choose_replicas(placement, 0, topk_ids, positions))
    return np.bincount(placement.rank_of_slot()[used], minlength=placement.num_ranks)


@pytest.mark.parametrize("seed", range(5))
def test_balanced_activations_beat_balanced_tokens_in_decode(seed: int) -> None:
    rng = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, 65)
    # 32 tokens a step, top 4 of 64 experts: Gumbel noise draws without replacement.
    noise = rng.gumbel(size=(600, 32, 64))
    steps = np.argsort(-(np.log(popularity) + noise), axis=2)[:, :, :4]
    counts = np.stack([np.bincount(step.ravel(), minlength=64) for step in steps])[:, None, :]
    by_tokens = global_placement(counts[:300].sum(axis=0), 8, 80)
    by_activation = global_placement(activation_frequencies(counts[:300]), 8, 80)
    static = contiguous_placement(1, 64, 8)
    busiest: dict[str, list[int]] = {"tokens": [], "activation": [], "static": []}
    for number, step in enumerate(steps[300:]):
        same_step = np.full(32, number)
        tokens = _activated(by_tokens, step, np.arange(32))
        activation = _activated(by_activation, step, same_step)
        # Replicas activate no more experts if a step uses one of each.
        assert activation.sum() == len(np.unique(step)) <= tokens.sum(), f"seed {seed}"
        busiest["tokens"].append(int(tokens.max()))
        busiest["activation"].append(int(activation.max()))
        busiest["static"].append(int(_activated(static, step, same_step).max()))
    mean = {name: float(np.mean(values)) for name, values in busiest.items()}
    assert mean["activation"] < 0.9 * mean["tokens"], f"seed {seed}: {mean}"
    assert mean["activation"] < 0.95 * mean["static"], f"seed {seed}: {mean}"


@pytest.mark.parametrize(
    ("layer", "topk_ids", "positions", "message"),
    [
        (1, [[0]], [0], "layer: expected 0 to 0, got 1"),
        (0, [[3]], [0], r"topk_ids: expected -1 to 2, got \[3\]"),
        (0, [[0, -2]], [0], r"topk_ids: expected -1 to 2, got \[-2\]"),
        (0, [0], [0], r"topk_ids: expected integers \[T, top_k\], got int64 \[1\]"),
        (0, [[0.5]], [0], r"topk_ids: expected integers \[T, top_k\], got float64 \[1, 1\]"),
        (0, [[0], [1]], [0], r"positions: expected integers \[2\], got int64 \[1\]"),
        (0, [[0]], [0.5], r"positions: expected integers \[1\], got float64 \[1\]"),
        (0, [[0]], [-1], "positions: expected at least 0, got -1"),
    ],
)
def test_wrong_tokens_are_refused(layer: int, topk_ids: Any, positions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        choose_replicas(PLACEMENT, layer, topk_ids, positions)


def test_no_tokens_choose_nothing() -> None:
    none = choose_replicas(PLACEMENT, 0, np.zeros((0, 4), dtype=np.int64), np.zeros(0, dtype=np.int64))
    assert none.shape == (0, 4)
