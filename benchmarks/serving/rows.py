"""One row of `benchmarks serving`: a server, its callers, and what they have measured."""

import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.caller import POWER_SECONDS, call_together
from benchmarks.lib.processes import free_port, running
from benchmarks.lib.processes import server as expertd

Row = dict[str, Any]
MODEL, HIDDEN = "deepseek-v3", 7168
SECONDS = 2.0
CALLER_PROCESSES = 4
LEAD_SECONDS = 0.2  # that one caller has been busy before what is measured; several: POWER_SECONDS
WAYS = {"http": "http", "sockets": "http", "shared memory": "region", "channel": "channel"}
CONFIG = """
models: [{models}]
shared_memory: {{enabled: true}}
limits: {{max_body_bytes: 134217728}}
channels: {{socket: {folder}/channels}}
"""
LAYER = """
  {{name: {name}, hidden_size: 7168, intermediate_size: 2048, num_experts: 256, top_k: 8,
    routing: {{scoring_func: sigmoid, routed_scaling_factor: 2.5, num_expert_groups: 8, topk_group: 4}}}}
"""


class Case(NamedTuple):
    """One row: the way, the device of the tensors, tokens a request, callers, layers that each calls in turn.

    Only callers of channels call several layers.
    """

    way: str  # of `WAYS`; "sockets": HTTP with a server that computes nothing
    device: str | None  # None: host memory
    tokens: int
    callers: int = 1
    layers: int = 1


def model_names(layers: int) -> list[str]:
    """The server's models, one for each layer."""
    return [MODEL, *(f"{MODEL}-{number}" for number in range(2, layers + 1))]


def config(layers: int, folder: str) -> str:
    """The settings of a server with this number of layers, as YAML. folder: for its socket."""
    models = ",".join(LAYER.format(name=name) for name in model_names(layers))
    return CONFIG.format(models=models, folder=folder)


@contextmanager
def server(
    workers: int,
    devices: str | None = None,
    layers: int = 1,
    make_config: Callable[[int, str], str] = config,
) -> Iterator[tuple[str, int]]:
    """A ready server with this number of layers, on one GPU or on `devices`: its URL and port."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "serving.yaml"
        file.write_text(make_config(layers, folder))
        options = ["--http-workers", str(workers)] if workers > 1 else []
        options += ["--devices", devices] if devices else []
        with expertd("--config", str(file), *options, quiet=False) as (port, _):
            yield f"http://127.0.0.1:{port}", port


def measure(case: Case, url: str) -> Row:
    """One row."""
    before = compute_seconds(url)
    if case.way == "sockets":
        port = free_port()
        with running(("-m", "benchmarks.serving.loopback", str(port)), port):
            latencies = latencies_of(case, f"http://127.0.0.1:{port}")
    else:
        latencies = latencies_of(case, url)
    after = compute_seconds(url)
    return {
        **case._asdict(),
        "requests": len(latencies),
        "p50_us": 1e6 * statistics.median(latencies),
        "p99_us": 1e6 * latencies[int(0.99 * len(latencies))],
        "tokens_per_second": len(latencies) * case.tokens / SECONDS,
        "compute_us": 1e6 * (after[0] - before[0]) / max(1.0, after[1] - before[1]),
        "steps": after[1] - before[1],
    }


def latencies_of(case: Case, url: str) -> list[float]:
    """Latencies in seconds of all callers of a row, sorted."""
    # Callers share few processes: more threads of one would wait for each other.
    processes = min(case.callers, CALLER_PROCESSES)
    given = {"way": WAYS[case.way], "url": url, "models": model_names(case.layers), "hidden_size": HIDDEN}
    given |= {"tokens": case.tokens, "device": case.device, "connections": case.callers // processes}
    return call_together(given, SECONDS, processes, LEAD_SECONDS if case.callers == 1 else POWER_SECONDS)


def compute_seconds(url: str) -> tuple[float, float]:
    """The sum and the count of `expertd_compute_seconds`."""
    return counted(url, "expertd_compute_seconds_sum", "expertd_compute_seconds_count")


def counted(url: str, one: str, other: str) -> tuple[float, float]:
    """Two of a server's metrics, of all models together."""
    time.sleep(0.3)  # steps are counted after their answers
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    first, second = (
        sum(float(value) for value in re.findall(rf"^{name}{{.*}} (.+)$", text, re.M))
        for name in (one, other)
    )
    return first, second
