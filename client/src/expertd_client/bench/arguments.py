"""The arguments of `expertd-client bench`, and its run."""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from expertd_client.bench.case import BenchError, BenchTarget, Case, Result
from expertd_client.bench.load import hidden_states
from expertd_client.bench.processes import Processes
from expertd_client.bench.report import heading, num_cpus, progress_bar, remarks, row, write_json
from expertd_client.client import ExpertClient
from expertd_client.errors import ExpertError
from expertd_client.transport import ORDER

Number = TypeVar("Number", int, float)

_MOST = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the bench."""
    add = parser.add_argument
    add("--url", default="http://localhost:8000", help="http(s)://host:port or unix:/path (%(default)s)")
    add("--model", help="a served model (default: the first)")
    add("--tokens", type=_list_of(int), default=[1, 8, 64], help="sizes of a request (1,8,64)")
    add("--connections", type=_list_of(int), default=[1, 32], help="numbers of connections (1,32)")
    add(
        "--rate",
        type=_list_of(float),
        default=[None],
        help="open loop: requests/s in all (closed loop)",
    )
    add("--seconds", type=_positive(float), default=5.0, help="of each measurement (%(default)s)")
    add("--warmup", type=_seconds, default=1.0, help="seconds before each (%(default)s)")
    add("--timeout", type=_positive(float), default=60.0, help="seconds a request may take (%(default)s)")
    add("--processes", type=_positive(int), help="that send requests (default: half of the CPUs)")
    add("--transport", choices=("auto", *ORDER), default="auto", help="how requests get there (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all figures to a file")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; returns 0, 1 if a request failed, 2 if nothing could be measured."""
    try:
        if arguments.json is not None:
            _check_writable(arguments.json)  # before minutes are spent
        target, server = _find(arguments)
        results: list[Result] = []
        try:
            _measure(target, _cases(arguments), arguments.processes, results)
        finally:
            if arguments.json is not None:
                write_json(arguments.json, target, server, results)
    except (ExpertError, BenchError, OSError) as error:
        print(f"{arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print("\n".join(remarks(results)))
    return 1 if any(result.failed for result in results) else 0


def _find(arguments: argparse.Namespace) -> tuple[BenchTarget, dict[str, object]]:
    """Ask the server about the layer, and try each size once. Raises ExpertError."""
    with ExpertClient(arguments.url, transport=arguments.transport, timeout=arguments.timeout) as client:
        server = client.server()
        name = arguments.model or next((model.name for model in client.models()), None)
        if name is None:
            raise ExpertError("model: expected a served one, got none")
        model = client.metadata(name)
        generator = np.random.default_rng(0)
        for tokens in arguments.tokens:
            client.infer(name, hidden_states(tokens, model.hidden_size, model.datatype, generator))
        sizes = f"{name}, hidden size {model.hidden_size}, {model.datatype}"
        print(f"{arguments.url}: {server.name} {server.version}, {sizes}, transport {client.transport}")
        target = BenchTarget(
            arguments.url, client.transport, name, model.hidden_size, model.datatype, arguments.timeout
        )
        return target, {"name": server.name, "version": server.version}


def _check_writable(path: Path) -> None:
    """Raises BenchError. Leaves no file."""
    is_new = not path.exists()
    try:
        with path.open("a"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        text = f"--json: expected a file that can be written to, got {path}: {error.strerror}"
        raise BenchError(text) from error


def _cases(arguments: argparse.Namespace) -> list[Case]:
    return [
        Case(tokens, connections, rate, arguments.seconds, arguments.warmup)
        for rate in arguments.rate
        for connections in arguments.connections
        for tokens in arguments.tokens
    ]


def _measure(target: BenchTarget, cases: list[Case], processes: int | None, results: list[Result]) -> None:
    """Append what is measured to `results`. Raises BenchError."""
    max_connections = max(case.connections for case in cases)
    count = min(max_connections, processes or max(1, num_cpus() // 2))
    total = sum(case.seconds + case.warmup for case in cases)
    with Processes(target, count) as senders, progress_bar(total) as progress:
        progress.write(heading())
        for case in cases:
            name = f"{case.tokens} tokens, {case.connections} connections"
            results.append(senders.measure(case, partial(progress.advance, name)))
            progress.write(row(results[-1]))


def _list_of(kind: type[Number]) -> Callable[[str], list[Number]]:
    convert = _positive(kind)

    def parse(text: str) -> list[Number]:
        return [convert(item) for item in text.split(",")]

    return parse


def _positive(kind: type[Number]) -> Callable[[str], Number]:
    def parse(text: str) -> Number:
        value = _number(kind, text)
        if not 0 < value < _MOST:
            raise argparse.ArgumentTypeError(f"expected positive numbers below {_MOST:g}, got {text!r}")
        return value

    return parse


def _seconds(text: str) -> float:
    value = _number(float, text)
    if not 0 <= value < _MOST:
        raise argparse.ArgumentTypeError(f"expected 0 or more, below {_MOST:g}, got {text!r}")
    return value


def _number(kind: type[Number], text: str) -> Number:
    try:
        return kind(text)
    except ValueError:
        return kind(-1)
