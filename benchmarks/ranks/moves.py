"""Measures balancing while steps run: the speed of skewed and uniform steps, and what a move costs them.

Ranks on this machine's CPU, or on GPUs with `--devices 0-1`. Each row is the time of steps of one request,
from its begin to its output, and the max/mean of the ranks' tokens in them.
"""

import argparse
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.timing import cpu_name
from expertd.service.engine.loading import Loaded
from expertd.service.moe.request import LayerRequest
from expertd.service.ranks.loading import load_ranks
from expertd.service.settings.model import Settings

_DRAWS = 16  # different requests


def main() -> None:
    """Print a row for each kind of steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, default in (
        ("ranks", 2), ("experts", 64), ("replicas", 8), ("hidden", 512), ("intermediate", 256), ("top-k", 4),
        ("tokens", 256), ("steps", 200), ("moves", 6),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--devices", help="GPUs instead of ranks on the CPU, such as 0-1")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the skewed routing")
    parser.add_argument("--reduced", action="store_true", help="without exact_combine")
    given = parser.parse_args()
    loaded = load_ranks(_settings(given), lambda: False)
    try:
        print(f"{loaded.device} on {cpu_name()}; {vars(given)}")
        print(f"{'steps':<28}{'median ms':>10}{'p99':>9}{'longest':>9}{'max/mean':>10}")
        _measure(given, loaded)
    finally:
        loaded.close()


def _settings(given: argparse.Namespace) -> Settings:
    model = {
        "name": "layer", "hidden_size": given.hidden, "intermediate_size": given.intermediate,
        "num_experts": given.experts, "top_k": given.top_k, "datatype": "BF16",
    }  # fmt: skip
    where: dict[str, Any] = {"backend": "reference", "ranks": given.ranks}
    if given.devices is not None:
        where = {"devices": given.devices}
    return Settings.model_validate(
        {
            **where,
            "models": [model],
            "placement": {"policy": "static", "replicas": given.replicas, "max_moves": 2**20},
            "exact_combine": not given.reduced,
            "log_level": "warning",
        }
    )


def _measure(given: argparse.Namespace, loaded: Loaded) -> None:
    placements = loaded.placements
    assert placements is not None
    uniform, skewed = (_requests(given, exponent) for exponent in (0.0, given.zipf))
    _steps(loaded, uniform, given.steps)  # the first ones are slow

    _row("uniform", *_steps(loaded, uniform, given.steps))
    _row(f"Zipf {given.zipf:g}", *_steps(loaded, skewed, given.steps))
    before = [list(rank) for rank in placements.states()["layer"].ranks]
    done = placements.rebalance(["layer"])
    moving = [_steps(loaded, skewed, 1) for _ in iter(done.done, True)]
    balanced = [list(rank) for rank in placements.states()["layer"].ranks]
    state = placements.states()["layer"]
    for turn in range(given.moves):  # there and back, for more steps during moves
        done = placements.pin("layer", balanced if turn % 2 else before)
        moving += [_steps(loaded, skewed, 1) for _ in iter(done.done, True)]
    placements.pin("layer", balanced).result()
    times = np.concatenate([times for times, _ in moving])
    _row("Zipf, while experts move", times, np.array([np.nan]))
    _row("Zipf, balanced", *_steps(loaded, skewed, given.steps))
    _row("uniform, balanced for Zipf", *_steps(loaded, uniform, given.steps))
    print(f"moved {state.moves} experts in {state.move_seconds * 1e3:.1f} ms; plan: {state.last_plan}")


def _requests(given: argparse.Namespace, exponent: float) -> list[LayerRequest]:
    """Requests of bf16 zeros and ones, whose experts e have a weight of 1 / (e + 1) ** exponent."""
    random = np.random.default_rng(0)
    requests = []
    for _ in range(_DRAWS):
        keys = random.gumbel(size=(given.tokens, given.experts))
        keys -= exponent * np.log(np.arange(1, given.experts + 1))
        ids = np.argsort(-keys, axis=1)[:, : given.top_k].astype(np.int32)
        states = (random.random((given.tokens, given.hidden)) < 0.5).astype(np.uint16) * 0x3F80
        weights = np.full(ids.shape, 1 / given.top_k, np.float32)
        requests.append(
            LayerRequest(
                given.tokens, states.tobytes(), "BF16", ids.tobytes(), "INT32", weights.tobytes(), "BF16"
            )
        )
    return requests


def _steps(
    loaded: Loaded, requests: list[LayerRequest], count: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of each step, and the tokens of each rank's experts in all of them."""
    runner, times = loaded.runners["layer"], []
    before = np.array([rank.expert_tokens for rank in loaded.ranks()])
    for number in range(count):
        start = time.perf_counter()
        runner.begin([requests[number % len(requests)]]).finish()
        times.append(time.perf_counter() - start)
    return np.array(times), np.array([rank.expert_tokens for rank in loaded.ranks()]) - before


def _row(name: str, times: NDArray[np.float64], tokens: NDArray[Any]) -> None:
    median, late, longest = (np.quantile(times, part) * 1e3 for part in (0.5, 0.99, 1.0))
    print(f"{name:<28}{median:10.2f}{late:9.2f}{longest:9.2f}{tokens.max() / tokens.mean():10.3f}")
