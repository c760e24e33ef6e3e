"""Times the policies that place experts on ranks, and prints the balance that they reach."""

import argparse
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.timing import cpu_name
from expertd.service.moe.placement import (
    Placement,
    contiguous_placement,
    global_placement,
    hierarchical_placement,
    plan_change,
)

LOADS: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "lognormal": lambda rng, n: rng.lognormal(size=n),
    "Zipf 1.0": lambda rng, n: rng.permutation(1 / np.arange(1, n + 1)),
    "Dirichlet 1": lambda rng, n: rng.dirichlet(np.ones(n)),
}


def main() -> None:
    """Print a row for each distribution of loads."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 58), ("experts", 256), ("ranks", 32), ("replicas", 288), ("nodes", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument(
        "--moves", type=int, default=256, help="the experts that may move, for the last columns"
    )
    parser.add_argument("--calls", type=int, default=50, help="calls, of which the fastest counts")
    given = parser.parse_args()
    print(f"{cpu_name()}, one core; {vars(given)}; max/mean of a layer's ranks, the mean of all layers")
    print(
        f"{'loads':<12}{'static':>8}{'global':>9}{'ms':>7}{'hierarchical':>14}{'ms':>7}{'moved':>8}{'after':>8}"
    )
    for name, draw in LOADS.items():
        rng = np.random.default_rng(0)
        loads = np.stack([draw(rng, given.experts) for _ in range(given.layers)])
        print(f"{name:<12}{_row(loads, given)}")


def _row(loads: NDArray[np.float64], given: argparse.Namespace) -> str:
    ranks, replicas = given.ranks, given.replicas
    static = contiguous_placement(len(loads), given.experts, ranks, replicas)
    everywhere, by_rank = _best(given.calls, lambda: global_placement(loads, ranks, replicas))
    nodes = {"num_nodes": given.nodes, "num_groups": given.groups}
    by_node, in_nodes = _best(given.calls, lambda: hierarchical_placement(loads, ranks, replicas, **nodes))
    change = plan_change(static, by_rank, loads, max_moves=given.moves)
    return (
        f"{static.imbalance(loads).mean():8.3f}"
        f"{by_rank.imbalance(loads).mean():9.4f}{everywhere:7.2f}"
        f"{in_nodes.imbalance(loads).mean():14.3f}{by_node:7.2f}"
        f"{change.moves:8}{change.after.mean():8.3f}"
    )


def _best(calls: int, policy: Callable[[], Placement]) -> tuple[float, Placement]:
    """Milliseconds of the fastest call, and what it returned."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        placement = policy()
        times.append((time.perf_counter() - start) * 1e3)
    return min(times), placement
