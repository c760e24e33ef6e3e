"""What metrics cost: `python -m benchmarks.metrics_cost [--json FILE] [--rounds N]`.

Two servers of the same small layer, one of which counts nothing: over HTTP with 32 connections, and through
one channel. They take turns in each round, the first one changing; /metrics of both is scraped once a second.
A row has the best rate of each, the median of the rounds' ratios with its quartiles, and for HTTP the ratio
of the least processor times for a request. The last row has the microseconds of the calls alone, in a loop.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import timeit
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import cpu_name

SECONDS = 1.0
_CALLS = 1280  # of a loop; steps are counted 64 at a time
MODEL: dict[str, Any] = {
    "name": "moe",
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_experts": 16,
    "top_k": 4,
    "datatype": "BF16",
}
NAMES = ("counting", "silent")
CASES = {"HTTP, 32 connections": 32, "one channel": 0}


def serve(name: str, port: int) -> int:
    """A server, in this process; the silent one counts neither requests nor steps."""
    from expertd.service.engine.metrics import Metrics
    from expertd.service.http.server import serve as serve_http
    from expertd.service.settings.model import Settings

    if name == "silent":

        def nothing(self: Metrics, *_: object) -> None:
            pass

        for method in ("request_done", "step_done"):
            setattr(Metrics, method, nothing)
    with tempfile.TemporaryDirectory() as folder:
        channels = {"socket": f"{folder}/channels"}
        return serve_http(Settings.model_validate({"port": port, "models": [MODEL], "channels": channels}))


@contextmanager
def server(name: str) -> Iterator[tuple[int, int]]:
    """The port and process id of a server that is ready."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.metrics_cost", "--serve", name, str(port)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    try:
        _wait_ready(port)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)


def requests_of(port: int, connections: int) -> int:
    """The requests that are answered in SECONDS."""
    if connections:
        name = "benchmarks.fast_caller"
        given: dict[str, Any] = {"connections": connections, "tokens": 1, "datatype": "BF16", "port": port}
        given["hidden_size"] = MODEL["hidden_size"]
    else:
        name = "benchmarks.channel_caller"
        given = {"url": f"http://127.0.0.1:{port}", "models": ["moe"], "tokens": 1, "device": None}
        given["callers"] = 1
    text = json.dumps({**given, "seconds": SECONDS})
    ran = subprocess.run(
        [sys.executable, "-m", name], input=text, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    found = json.loads(ran.stdout)
    return round(found["rps"] * SECONDS) if connections else len(found)


@contextmanager
def scraping(port: int) -> Iterator[None]:
    """Scrapes once a second, as long as the block runs."""
    end = threading.Event()

    def scrape() -> None:
        while not end.wait(SECONDS):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def compare(connections: int, servers: dict[str, tuple[int, int]], rounds: int) -> dict[str, float]:
    """One row."""
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in servers}
    for number in range(rounds):
        for name in servers if number % 2 else reversed(servers):
            port, pid = servers[name]
            before = _cpu_seconds(pid)
            with scraping(port):
                count = requests_of(port, connections)
            found[name].append((count, (_cpu_seconds(pid) - before) / count))
    ratios = [one / other for (one, _), (other, _) in zip(*found.values(), strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    row = {"ratio": middle, "low": low, "high": high}
    for name, rows in found.items():
        row[f"{name}_rate"] = max(count for count, _ in rows) / SECONDS
    if connections:  # with a channel, a server that waits for a request looks for it all the time
        counting, silent = (min(seconds for _, seconds in rows) for rows in found.values())
        row["cpu_ratio"] = counting / silent
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every row as it is measured, and write all of them to a file if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        return serve(given.serve[0], int(given.serve[1]))
    calls = call_microseconds()
    with ExitStack() as stack:
        servers = {name: stack.enter_context(server(name)) for name in NAMES}
        rows = {}
        for what, connections in CASES.items():
            rows[what] = compare(connections, servers, given.rounds)
            print(line(what, rows[what]), flush=True)
    print("in a loop: " + ", ".join(f"{what} {microseconds:.2f} us" for what, microseconds in calls.items()))
    if given.json:
        machine = {
            "cpus": len(os.sched_getaffinity(0)),
            "cpu": cpu_name(),
            "python": platform.python_version(),
        }
        given.json.write_text(json.dumps({"machine": machine, "rows": rows, "calls": calls}, indent=1) + "\n")
    return 0


def call_microseconds() -> dict[str, float]:
    """What counting a request takes, and a step of one request: the best of 20 loops."""
    from expertd.layout import Layout
    from expertd.service.engine.metrics import Metrics
    from expertd.service.moe.request import StepResult
    from expertd.service.moe.shape import LayerShape

    metrics = Metrics("0")
    sizes = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["num_experts"], MODEL["top_k"]
    shape = LayerShape(*sizes)
    metrics.add_models({"moe": shape}, shape.num_experts)
    tokens = np.ones(shape.num_experts, np.int32)
    step = StepResult([], Layout.CONTIGUOUS, 4, lambda: tokens - 0, 100e-6)
    stages = (1e-6, 2e-6, 100e-6)
    calls: dict[str, Callable[[], object]] = {
        "request": lambda: metrics.request_done("moe", 200, 150e-6, stages),
        "step": lambda: metrics.step_done("moe", step, (2e-6,)),
    }
    return {
        what: min(timeit.repeat(call, number=_CALLS, repeat=20)) / _CALLS * 1e6
        for what, call in calls.items()
    }


def line(what: str, row: dict[str, float]) -> str:
    """A row as text."""
    cpu = f"; of processor time for a request {row['cpu_ratio']:.3f}" if "cpu_ratio" in row else ""
    rates = f"{row['counting_rate']:.0f} and {row['silent_rate']:.0f} requests/s"
    return f"{what}: {rates}, ratio {row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f}){cpu}"


def _wait_ready(port: int) -> None:
    until(
        lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=10).status == 200
    )


def until(is_done: Callable[[], bool]) -> None:
    """Wait up to a minute; OSError means no."""
    pause = threading.Event()
    for _ in range(600):
        try:
            if is_done():
                return
        except OSError:
            pass
        pause.wait(0.1)
    raise TimeoutError("expected a server within 60 s, got none")


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
