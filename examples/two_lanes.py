"""Two callers of one layer, first in one queue, then on two lanes: `python -m examples.two_lanes`.

Caller A sends one long request, as prefill does. While it is computed, caller B sends short ones, one after
another, as decode does. The example starts the servers itself and prints in which order answers came.
"""

import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from examples.server import run_server
from expertd_client import ExpertClient

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "demo.yaml"
HIDDEN_SIZE, LONG_TOKENS, SHORT_TOKENS, SHORT_REQUESTS = 1024, 1024, 1, 5
# A layer that takes a CPU about a second for a long request.
LAYER = [
    f"--set={setting}"
    for setting in (
        "backend=reference",
        f"models.0.hidden_size={HIDDEN_SIZE}",
        "models.0.intermediate_size=2048",
        "models.0.top_k=8",
        "models.0.datatype=BF16",
    )
]
LANES = ["--set=lanes={decode_max_tokens: 64}"]


def answers(url: str) -> list[tuple[str, float]]:
    """Which requests were answered, in order, and the milliseconds that each took."""
    random = np.random.default_rng(0)
    long = random.standard_normal((LONG_TOKENS, HIDDEN_SIZE)).astype(np.float16)
    short = random.standard_normal((SHORT_TOKENS, HIDDEN_SIZE)).astype(np.float16)
    answered: list[tuple[str, float]] = []

    def ask(client: ExpertClient, name: str, hidden_states: npt.NDArray[np.float16]) -> float:
        begin = time.perf_counter()
        client.infer("demo", hidden_states)
        seconds = time.perf_counter() - begin
        answered.append((name, seconds * 1000))
        return seconds

    with ExpertClient(url, transport="http") as first, ExpertClient(url, transport="http") as second:
        ask(second, "warm-up", short)
        seconds = ask(first, "warm-up", long)
        answered.clear()
        caller = threading.Thread(target=ask, args=(first, "long", long))
        caller.start()
        time.sleep(0.25 * seconds)  # by then the long request is being computed
        for _ in range(SHORT_REQUESTS):
            ask(second, "short", short)
        caller.join()
    return answered


def main() -> int:
    """Print the order of answers in one queue and on two lanes."""
    for name, settings in (("one queue", LAYER), ("two lanes", LAYER + LANES)):
        with run_server(["--config", CONFIG, *settings]) as url:
            answered = answers(url)
        (long,) = (took for what, took in answered if what == "long")
        first = next(took for what, took in answered if what == "short")
        print(f"{name}: {' '.join(what for what, _ in answered)}")
        print(f"  the long request took {long:.0f} ms, the first short one {first:.0f} ms")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
