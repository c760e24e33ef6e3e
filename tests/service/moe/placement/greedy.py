"""DeepSeek's EPLB and the rule of replicas by their descriptions, slow and simple; loads to compare on."""

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from expertd.service.moe.placement import Placement

Floats = NDArray[np.float64]

LOADS: dict[str, Callable[[np.random.Generator, int], Floats]] = {
    "lognormal": lambda rng, n: rng.lognormal(sigma=1.0, size=n),
    "lognormal tokens": lambda rng, n: np.floor(100 * rng.lognormal(sigma=1.5, size=n)),
    "zipf 0.5": lambda rng, n: rng.permutation(1 / np.arange(1, n + 1) ** 0.5),
    "zipf 1.0": lambda rng, n: rng.permutation(1 / np.arange(1, n + 1)),
    "zipf 1.5": lambda rng, n: rng.permutation(1 / np.arange(1, n + 1) ** 1.5),
    "dirichlet 1": lambda rng, n: rng.dirichlet(np.ones(n)),
    "dirichlet 0.3": lambda rng, n: rng.dirichlet(np.full(n, 0.3)),
    "pareto 1.2": lambda rng, n: rng.pareto(1.2, size=n),
    "few tokens": lambda rng, n: rng.integers(0, 10, size=n).astype(np.float64),
}


def draw(name: str, rng: np.random.Generator, num_experts: int) -> Floats:
    return LOADS[name](rng, num_experts)


def greedy_global(loads: Floats, num_ranks: int, num_physical: int) -> float:
    """The largest load of a rank, for one layer [num_experts]."""
    counts = [1] * len(loads)
    for _ in range(num_physical - len(loads)):
        most = max(range(len(loads)), key=lambda e: loads[e] / counts[e])
        counts[most] += 1
    replicas = [loads[e] / counts[e] for e in range(len(loads)) for _ in range(counts[e])]
    base, more = divmod(num_physical, num_ranks)
    return max(sum(rank) for rank in _pack(replicas, [base + (r < more) for r in range(num_ranks)]))


def _pack(weights: list[float], capacity: list[int]) -> list[list[float]]:
    """The heaviest first, each to the lightest pack with room: the weights of each pack."""
    packed: list[list[float]] = [[] for _ in capacity]
    sums = [0.0] * len(capacity)
    for weight in sorted(weights, reverse=True):
        pack = min((p for p in range(len(capacity)) if len(packed[p]) < capacity[p]), key=lambda p: sums[p])
        packed[pack].append(weight)
        sums[pack] += weight
    return packed


def repeated(placement: Placement) -> int:
    """Physical experts whose rank holds the same expert in another slot."""
    held = [placement.experts_of_rank(rank) for rank in range(placement.num_ranks)]
    return sum(len(experts) - len(set(experts.tolist())) for experts in held)


def by_rank(placement: Placement) -> list[list[int]]:
    """The sorted experts of each rank."""
    return [sorted(placement.experts_of_rank(rank).tolist()) for rank in range(placement.num_ranks)]


def chosen_replicas(placement: Placement, topk_ids: ArrayLike, positions: ArrayLike) -> NDArray[np.int64]:
    """The physical expert of each pair by the rule of docs/internals/placement.md, in Python's integers."""
    held = placement.physical_to_logical.tolist()
    replicas = [
        [slot for slot, other in enumerate(held) if other == expert]
        for expert in range(placement.num_experts)
    ]

    def replica(position: int, expert: int) -> int:
        count, mixed = len(replicas[expert]), (position + expert) * 2654435769 % 2**32
        return replicas[expert][count * mixed // 2**32]

    rows = zip(np.asarray(topk_ids).tolist(), np.asarray(positions).tolist(), strict=True)
    chosen = [[replica(position, e) if e >= 0 else -1 for e in experts] for experts, position in rows]
    return np.array(chosen, np.int64)
