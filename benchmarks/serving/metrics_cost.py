"""What metrics and spans cost: `python -m benchmarks metrics_cost [--json FILE] [--rounds N]`.

Two servers of the same small layer: one counts as servers do, or nothing while a signal tells it so, for
two processes with the same work differ by more than is measured here; the other one also sends spans of a
hundredth of its requests (the default) to a process that takes them. Requests come over HTTP by 32
connections, and through one channel, which has no spans. In each round every way has two turns, in an order
and then backwards, so that a drift of the machine cancels; the orders change, and /metrics is scraped once
a second. A row compares two ways: the median of the rounds' ratios of rates, with its 95% confidence
interval (by bootstrap), and for HTTP that of the processor times of a request, on which other programs have
less influence. The last row has the microseconds of the calls alone, in a loop.
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import tempfile
import threading
import timeit
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.callers import together
from benchmarks.lib.processes import free_port, running
from benchmarks.lib.run import new_parser
from benchmarks.lib.timing import cpu_name

SECONDS, LEAD_SECONDS = 1.0, 0.1
_CALLS = 1280  # of a loop; steps are counted 64 at a time
MODEL: dict[str, Any] = {
    "name": "moe",
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_experts": 16,
    "top_k": 4,
    "datatype": "BF16",
}
WAYS = {"silent": "counting", "counting": "counting", "tracing": "tracing"}
"""Each way, and the server whose it is."""
CASES: dict[str, tuple[int, tuple[str, str]]] = {
    "metrics, HTTP, 32 connections": (32, ("counting", "silent")),
    "spans, HTTP, 32 connections": (32, ("tracing", "counting")),
    "metrics, one channel": (0, ("counting", "silent")),
}
"""The connections, 0: a channel, and the ways that are compared, the one that does more first."""
_RESAMPLES = 2000


def serve(name: str, port: int, sink: int) -> int:
    """A server, in this process; from one SIGUSR1 to the next, it counts neither requests nor steps."""
    from expertd.service.engine.metrics import Metrics
    from expertd.service.http.server import serve as serve_http
    from expertd.service.settings.model import Settings

    def nothing(self: Metrics, *_: object) -> None:
        pass

    others: dict[str, Callable[..., None]] = dict.fromkeys(("request_done", "step_done"), nothing)

    def switch(*_: object) -> None:
        for method, other in others.items():
            others[method] = getattr(Metrics, method)
            setattr(Metrics, method, other)

    signal.signal(signal.SIGUSR1, switch)
    with tempfile.TemporaryDirectory() as folder:
        values = {"port": port, "models": [MODEL], "channels": {"socket": f"{folder}/channels"}}
        if name == "tracing":
            values["tracing"] = {"endpoint": f"http://127.0.0.1:{sink}/v1/traces"}
        return serve_http(Settings.model_validate(values))


class _Sink(BaseHTTPRequestHandler):
    """Takes spans, and forgets them."""

    def do_GET(self) -> None:
        self.send_response(200)  # it is ready once it listens
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def started(option: str, *arguments: str) -> Iterator[tuple[int, int]]:
    """The port and process id of this program with an option, whose arguments end with the port."""
    port = free_port()
    command = "-m", "benchmarks", "metrics_cost", option, *arguments, str(port)
    with running(command, port, OMP_NUM_THREADS="1") as process:
        yield port, process


def requests_of(port: int, connections: int) -> int:
    """The requests that are answered in SECONDS."""
    given: dict[str, Any] = {"url": f"http://127.0.0.1:{port}", "models": ["moe"], "tokens": 1}
    given |= {"way": "http" if connections else "channel", "hidden_size": MODEL["hidden_size"]}
    return len(together(given | {"connections": connections or 1}, SECONDS, lead=LEAD_SECONDS))


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


def measure(
    connections: int, servers: Mapping[str, tuple[int, int]], rounds: int
) -> list[dict[str, tuple[float, float]]]:
    """For each round, each server's requests a second, and the processor seconds of a request."""
    names, found = list(servers), []
    for number in range(rounds):
        order = names[number % len(names) :] + names[: number % len(names)]
        counts, seconds = dict.fromkeys(names, 0), dict.fromkeys(names, 0.0)
        for name in (*order, *reversed(order)):
            port, pid = servers[name]
            if name == "silent":
                os.kill(pid, signal.SIGUSR1)
            before = _cpu_seconds(pid)
            with scraping(port):
                counts[name] += requests_of(port, connections)
            seconds[name] += _cpu_seconds(pid) - before
            if name == "silent":
                os.kill(pid, signal.SIGUSR1)
        found.append({name: (counts[name] / 2 / SECONDS, seconds[name] / counts[name]) for name in names})
    return found


def compare(
    rounds: Sequence[Mapping[str, tuple[float, float]]], pair: tuple[str, str], connections: int
) -> dict[str, Any]:
    """A row: the server that does more over the other one."""
    more, less = pair
    row: dict[str, Any] = {
        "rates": [statistics.median(found[name][0] for found in rounds) for name in pair],
        "ratio": median_with_interval([found[more][0] / found[less][0] for found in rounds]),
    }
    if connections:  # with a channel, a server that waits for a request looks for it all the time
        row["cpu_ratio"] = median_with_interval([found[more][1] / found[less][1] for found in rounds])
    return row


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the ends of its 95% confidence interval, by bootstrap."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    edge = round(0.025 * _RESAMPLES)
    return statistics.median(values), medians[edge], medians[-1 - edge]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every row as it is measured, and write all of them to a file if asked to."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--sink", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        name, to, port = given.serve
        return serve(name, int(port), int(to))
    if given.sink:
        HTTPServer(("127.0.0.1", given.sink), _Sink).serve_forever()
    calls, rows = call_microseconds(), {}
    with ExitStack() as stack:
        sink, _ = stack.enter_context(started("--sink"))
        names = dict.fromkeys(WAYS.values())
        of = {name: stack.enter_context(started("--serve", name, str(sink))) for name in names}
        servers = {way: of[name] for way, name in WAYS.items()}
        for connections in sorted({connections for connections, _ in CASES.values()}, reverse=True):
            cases = {what: pair for what, (count, pair) in CASES.items() if count == connections}
            used = {name: servers[name] for name in WAYS if any(name in pair for pair in cases.values())}
            found = measure(connections, used, given.rounds)
            for what, pair in cases.items():
                rows[what] = compare(found, pair, connections)
                print(line(what, rows[what]), flush=True)
    print("in a loop: " + ", ".join(f"{what} {microseconds:.2f} us" for what, microseconds in calls.items()))
    if given.json:
        machine = {
            "cpus": len(os.sched_getaffinity(0)),
            "cpu": cpu_name(),
            "python": platform.python_version(),
        }
        about = {"machine": machine, "rounds": given.rounds, "seconds": SECONDS}
        given.json.write_text(json.dumps({**about, "rows": rows, "calls": calls}, indent=1) + "\n")
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
        "request": lambda: metrics.request_done("moe", None, 150e-6, stages),
        "step": lambda: metrics.step_done("moe", step, (2e-6,)),
    }
    return {
        what: min(timeit.repeat(call, number=_CALLS, repeat=20)) / _CALLS * 1e6
        for what, call in calls.items()
    }


def line(what: str, row: Mapping[str, Any]) -> str:
    """A row as text."""

    def ratio(key: str) -> str:
        return "{:.3f} ({:.3f} to {:.3f})".format(*row[key])

    more, less = row["rates"]
    cpu = f"; of processor time for a request {ratio('cpu_ratio')}" if "cpu_ratio" in row else ""
    return f"{what}: {more:.0f} and {less:.0f} requests/s, ratio {ratio('ratio')}{cpu}"


def _cpu_seconds(pid: int) -> float:
    """The processor time of a process, to the nanosecond; of the threads that it has."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
