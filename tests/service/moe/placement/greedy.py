"""DeepSeek's EPLB by its published description, slow and simple, and loads to compare placements on."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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


def draw(name: str, rng: np.random.Generator, num_layers: int, num_experts: int) -> Floats:
    return np.stack([LOADS[name](rng, num_experts) for _ in range(num_layers)])


def greedy_global(loads: Floats, num_ranks: int, num_physical: int) -> float:
    """The largest load of a rank, for one layer [num_experts]."""
    counts = [1] * len(loads)
    for _ in range(num_physical - len(loads)):
        most = max(range(len(loads)), key=lambda e: loads[e] / counts[e])
        counts[most] += 1
    replicas = [loads[e] / counts[e] for e in range(len(loads)) for _ in range(counts[e])]
    base, more = divmod(num_physical, num_ranks)
    return max(sum(rank) for rank in _pack(replicas, [base + (r < more) for r in range(num_ranks)])[1])


def greedy_hierarchical(
    loads: Floats, num_ranks: int, num_physical: int, num_nodes: int, num_groups: int
) -> float:
    """The largest load of a rank, for one layer [num_experts]."""
    groups = loads.reshape(num_groups, -1)
    nodes, _ = _pack([float(load) for load in groups.sum(axis=1)], [num_groups // num_nodes] * num_nodes)
    return max(
        greedy_global(groups[node].ravel(), num_ranks // num_nodes, num_physical // num_nodes)
        for node in nodes
    )


def _pack(weights: list[float], capacity: list[int]) -> tuple[list[list[int]], list[list[float]]]:
    """The heaviest first, each to the lightest pack with room: the items of each pack, and their weights."""
    items: list[list[int]] = [[] for _ in capacity]
    packed: list[list[float]] = [[] for _ in capacity]
    sums = [0.0] * len(capacity)
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        room = [p for p in range(len(capacity)) if len(items[p]) < capacity[p]]
        pack = min(room, key=lambda p: sums[p])
        items[pack].append(item)
        packed[pack].append(weights[item])
        sums[pack] += weights[item]
    return items, packed


def repeated(placement: Placement) -> int:
    """Physical experts whose rank holds the same expert in another slot."""
    held = [
        placement.experts_of_rank(layer, rank)
        for layer in range(placement.num_layers)
        for rank in range(placement.num_ranks)
    ]
    return sum(len(experts) - len(set(experts.tolist())) for experts in held)


def by_rank(placement: Placement) -> list[list[list[int]]]:
    """The sorted experts of each rank of each layer."""
    return [
        [sorted(placement.experts_of_rank(layer, rank).tolist()) for rank in range(placement.num_ranks)]
        for layer in range(placement.num_layers)
    ]
