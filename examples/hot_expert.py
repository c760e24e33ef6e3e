"""An expert that gets most tokens is replicated: `python -m examples.hot_expert`.

The example starts a server with two ranks, whose memory has room for one expert more each, sends tokens that
all go to expert 5, and has the server rebalance. It prints which rank holds which experts before and after.
"""

import json
import time
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from examples.server import run_server
from expertd_client import ExpertClient

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "demo-2ranks.yaml"
PLACEMENT = "--set=placement={policy: static, replicas: 2, interval_seconds: 3600}"
HOT, REQUESTS, TOKENS = 5, 20, 500


def send(url: str) -> None:
    """Every token goes to expert 5, and to three of the others in turn."""
    others = np.array([expert for expert in range(16) if expert != HOT], np.int32)
    experts = np.empty((TOKENS, 4), np.int32)
    experts[:, 0] = HOT
    experts[:, 1:] = others[np.arange(3 * TOKENS).reshape(TOKENS, 3) % 15]
    weights = np.full((TOKENS, 4), 0.25, np.float32)
    hidden_states = np.random.default_rng(0).standard_normal((TOKENS, 512), np.float32)
    with ExpertClient(url) as client:
        for _ in range(REQUESTS):
            client.infer("demo", hidden_states, experts, weights)


def placement(url: str, change: dict[str, str] | None = None) -> Any:
    """The answer of GET, or of POST with `change`, for the layer."""
    data = None if change is None else json.dumps(change).encode()
    with urlopen(Request(f"{url}/v1/placement", data=data)) as answer:
        return json.load(answer)["models"]["demo"]


def show(title: str, shown: Any) -> None:
    """Print the experts of each rank, and how uneven their loads are."""
    total = sum(rank["load"] for rank in shown["ranks"])
    print(f"{title}: the busier rank has {shown['max_over_mean']:.2f} times the mean")
    for number, rank in enumerate(shown["ranks"]):
        print(f"  rank {number}: {rank['load'] / total:.0%} of the load, experts {sorted(rank['experts'])}")


def counted(url: str) -> Any:
    """The placement, once the server has counted all tokens, which it does after its answers."""
    while sum((shown := placement(url))["loads"]) < 0.99 * REQUESTS * TOKENS * 4:
        time.sleep(0.01)
    return shown


def main() -> int:
    """Print the placement before and after, and what moved."""
    with run_server(["--config", CONFIG, PLACEMENT]) as url:
        send(url)
        show("before", counted(url))
        changed = placement(url, {"action": "rebalance"})
        print(f"{changed['last_plan']['moves']} experts move; requests are still answered")
        show("after", changed)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
