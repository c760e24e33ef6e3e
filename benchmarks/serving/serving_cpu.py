"""HTTP on a CPU, beside a plain Starlette route: `python -m benchmarks serving_cpu [--json FILE]`.

Both serve the same function, in binary over the Open Inference Protocol. The servers and their caller are
processes of their own on one machine. Each of the caller's connections sends its next request when it has
read the last answer. The servers take turns in each round; a row has the medians of all rounds, and their
ratio.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib.timing import cpu_name

SECONDS = 3.0


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
    """The port of a server that listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.serving.cpu_servers", name, str(port), str(hidden_size)]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
        time.sleep(1)  # expertd listens before it is ready
        yield port
    finally:
        process.terminate()
        process.wait(60)


def measure(port: int, case: Case) -> dict[str, float]:
    """One server's figures in one round."""
    given = {**case._asdict(), "port": port, "seconds": SECONDS}
    command = [sys.executable, "-m", "benchmarks.serving.fast_caller"]
    ran = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(ran.stderr)
    figures: dict[str, float] = json.loads(ran.stdout)
    return figures


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


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    what = f"{row['connections']} x [{row['tokens']}, {row['hidden_size']}] {row['datatype']}"
    figures = (
        f"{row[name]['rps']:9.1f}/s {row[name]['p50_ms']:8.3f} ms" for name in ("starlette", "expertd")
    )
    return f"{what:24} {'  '.join(figures)}  {row['ratio']:5.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every row as it is measured, and write all of them to a file if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    print(f"{'connections x tensor':24} {'starlette, p50':>23} {'expertd, p50':>24}  ratio")
    rows = []
    for hidden_size in dict.fromkeys(case.hidden_size for case in CASES):
        with ExitStack() as stack:
            names = ("starlette", "expertd")
            ports = {name: stack.enter_context(server(name, hidden_size)) for name in names}
            for case in CASES:
                if case.hidden_size == hidden_size:
                    rows.append(compare(case, ports, given.rounds))
                    print(line(rows[-1]), flush=True)
    if given.json:
        machine = {
            "cpus": len(os.sched_getaffinity(0)),
            "cpu": cpu_name(),
            "python": platform.python_version(),
            "starlette": metadata.version("starlette"),
        }
        given.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
