"""Times the policy that places a layer's experts on ranks, and prints the balance that it reaches."""

import argparse
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.timing import cpu_name
from expertd.service.moe.placement import contiguous_placement, global_placement, plan_change

LOADS: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "lognormal": lambda rng, n: rng.lognormal(size=n),
    "Zipf 1.0": lambda rng, n: rng.permutation(1 / np.arange(1, n + 1)),
    "Dirichlet 1": lambda rng, n: rng.dirichlet(np.ones(n)),
}


def main() -> None:
    """Print a row for each distribution of loads."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 50), ("experts", 256), ("ranks", 8), ("replicas", 288), ("moves", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    print(f"{cpu_name()}; {vars(given)}; max/mean of the ranks, ms of a plan: means of all layers")
    print(f"{'loads':<12}{'static':>8}{'global':>9}{'ms':>7}{'moved':>8}{'after':>8}")
    for name, draw in LOADS.items():
        rng = np.random.default_rng(0)
        rows = [_row(draw(rng, given.experts), given) for _ in range(given.layers)]
        static, balanced, seconds, moves, after = np.mean(rows, axis=0)
        print(f"{name:<12}{static:8.3f}{balanced:9.4f}{1e3 * seconds:7.2f}{moves:8.1f}{after:8.3f}")


def _row(loads: NDArray[np.float64], given: argparse.Namespace) -> list[float]:
    static = contiguous_placement(given.experts, given.ranks, given.replicas)
    start = time.perf_counter()
    balanced = global_placement(loads, given.ranks, given.replicas)
    seconds = time.perf_counter() - start
    change = plan_change(static, balanced, loads, max_moves=given.moves)
    return [change.before, balanced.imbalance(loads), seconds, change.moves, change.after]
