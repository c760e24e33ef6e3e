"""HTTP on a CPU, beside a plain Starlette route: `python -m benchmarks serving_cpu [--json FILE]`.

Both serve the same function, in binary over the Open Inference Protocol. The servers and their caller are
processes of their own on one machine. Each of the caller's connections sends its next request when it has
read the last answer. The servers take turns in each round; a row has the medians of all rounds, and their
ratio.
"""

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from typing import Any, NamedTuple

from benchmarks.lib.caller import call_together
from benchmarks.lib.processes import free_port, running
from benchmarks.lib.run import Result, new_parser
from benchmarks.lib.timing import cpu_name

SECONDS, LEAD_SECONDS = 3.0, 0.5


class Case(NamedTuple):
    """One row: connections, and the tensor [tokens, hidden_size] of their requests."""

    connections: int
    tokens: int
    hidden_size: int
    datatype: str


CASES = (
    Case(1, 1, 256, "FP32"),
    Case(32, 8, 256, "FP32"),
    Case(4, 2048, 256, "FP32"),
    Case(4, 4096, 7168, "BF16"),
)


@contextmanager
def server(name: str, hidden_size: int) -> Iterator[int]:
    """The port of a server that is ready."""
    port = free_port()
    command = "-m", "benchmarks.serving.cpu_servers", name, str(port), str(hidden_size)
    with running(command, port, OMP_NUM_THREADS="1"):
        yield port


def measure(port: int, case: Case) -> dict[str, float]:
    """One server's figures in one round."""
    given = {"way": "http", "url": f"http://127.0.0.1:{port}", "models": ["moe"], **case._asdict()}
    latencies = call_together(given, SECONDS, lead=LEAD_SECONDS)
    p50, p99 = (1e3 * latencies[int(part * len(latencies))] for part in (0.5, 0.99))
    return {"rps": len(latencies) / SECONDS, "p50_ms": p50, "p99_ms": p99}


def compare(case: Case, ports: dict[str, int], rounds: int) -> dict[str, Any]:
    """One row."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
    for _ in range(rounds):
        for name, port in ports.items():
            found[name].append(measure(port, case))
    medians = {
        name: {figure: statistics.median(row[figure] for row in rows) for figure in rows[0]}
        for name, rows in found.items()
    }
    return {**case._asdict(), **medians, "ratio": medians["expertd"]["rps"] / medians["starlette"]["rps"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every row as it is measured, and write all of them to a file if asked to."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "starlette": metadata.version("starlette"),
    }
    result = Result(given.json, machine)
    for hidden_size in dict.fromkeys(case.hidden_size for case in CASES):
        with ExitStack() as stack:
            names = ("starlette", "expertd")
            ports = {name: stack.enter_context(server(name, hidden_size)) for name in names}
            for case in CASES:
                if case.hidden_size == hidden_size:
                    result.put(compare(case, ports, given.rounds))
    return 0
