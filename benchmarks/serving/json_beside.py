"""One-token requests beside connections that send JSON: `python -m benchmarks json_beside [--connections N]`.

The demo layer, served on this machine, answers a caller that sends one token in binary again and again.
Beside it, other connections repeat the most expensive requests in JSON that the limit allows. Every process
may use all cores.
"""

import argparse
import gzip
import http.client
import json
import multiprocessing as mp
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

PATH = "/v2/models/demo/infer"
HIDDEN = 512
NUMBER_BYTES = 24  # that the server counts for a number of an answer


class Request(NamedTuple):
    body: bytes
    headers: dict[str, str]
    status: int  # of its answer


def binary(num_tokens: int, binary_output: bool = True, **parameters: int) -> Request:
    """A request whose tensor is binary."""
    data = rows(num_tokens).tobytes()
    entry = {"name": "hidden_states", "datatype": "FP32", "shape": [num_tokens, HIDDEN]}
    inputs = [{**entry, "parameters": {"binary_data_size": len(data)}}]
    given = {"binary_data_output": binary_output, **parameters}
    head = json.dumps({"inputs": inputs, "parameters": given}).encode()
    return Request(head + data, {"Inference-Header-Content-Length": str(len(head))}, 200)


def numbers(limit: int) -> Request:
    """The largest request in JSON of at most `limit` bytes."""
    num_tokens = limit // (20 * HIDDEN)
    while True:
        data = rows(num_tokens).ravel().tolist()
        entry = {"name": "hidden_states", "datatype": "FP32", "shape": [num_tokens, HIDDEN], "data": data}
        text = {"inputs": [entry], "parameters": {"binary_data_output": True}}
        body = json.dumps(text, separators=(",", ":")).encode()
        if len(body) <= limit:
            return Request(body, {}, 200)
        num_tokens -= 1


def repeated(value: str, limit: int, packed: bool) -> Request:
    """An array of `value` where tensors should be, `limit` bytes long before it is compressed."""
    body = f'{{"inputs":[{",".join([value] * ((limit - 13) // (len(value) + 1)))}]}}'.encode()
    return (
        Request(gzip.compress(body), {"Content-Encoding": "gzip"}, 400) if packed else Request(body, {}, 400)
    )


def cases(limit: int) -> dict[str, Request | None]:
    """What runs beside the caller."""
    return {
        "nothing": None,
        "numbers in JSON": numbers(limit),
        "`{}` in JSON": repeated("{}", limit, packed=False),
        "`1` in JSON, compressed": repeated("1", limit, packed=True),
        "answers in JSON": binary(min(4096, limit // (NUMBER_BYTES * HIDDEN)), binary_output=False),
    }


def repeat(port: int, request: Request, stop: Event, answered: "Synchronized[int]") -> None:
    """Send `request` on one connection until `stop` is set, and count the answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    while not stop.is_set():
        _send(connection, request)
        with answered.get_lock():
            answered.value += 1


@contextmanager
def server(*settings: str, cpus: Collection[int] | None = None) -> Iterator[int]:
    """The port of a server with these settings, which is ready."""
    with server_process(*settings, cpus=cpus) as (port, _):
        yield port


@contextmanager
def server_process(*settings: str, cpus: Collection[int] | None = None) -> Iterator[tuple[int, int]]:
    """The port and process id of a server with these settings, which is ready; cpus: None: as here."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    options = [option for each in (f"port={port}", *settings) for option in ("--set", each)]
    limit = f"os.sched_setaffinity(0, {set(cpus)});" if cpus else ""
    run = f"import os, sys; {limit} from expertd.service.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", run, "serve", "--config", "configs/demo.yaml", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not _is_ready(port):
            if process.poll() is not None:
                raise RuntimeError(f"expertd serve: expected it to run, got exit code {process.returncode}")
            time.sleep(0.1)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def beside(port: int, request: Request | None, connections: int) -> "Iterator[Synchronized[int]]":
    """Repeat `request` on other connections, each a process; the number of their answers."""
    spawn = mp.get_context("spawn")
    with ExitStack() as stack:
        stop, answered = spawn.Event(), spawn.Value("q", 0)
        for _ in range(connections if request is not None else 0):
            process = spawn.Process(target=repeat, args=(port, request, stop, answered), daemon=True)
            process.start()
            stack.callback(process.join)
        stack.callback(stop.set)
        time.sleep(2)  # until they send
        yield answered


def measure(
    port: int, other: Request | None, connections: int, seconds: float, one: Request | None = None
) -> tuple[list[float], int]:
    """The seconds of each request of the caller, by default of one token; how many are answered beside."""
    one = one or binary(1)
    with (
        beside(port, other, connections) as answered,
        closing(http.client.HTTPConnection("127.0.0.1", port)) as connection,
    ):
        took: list[float] = []
        before = answered.value
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            _send(connection, one)
            took.append(time.perf_counter() - began)
        return took, answered.value - before


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row of the table for each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--limit", type=int, default=1 << 20, help="max_json_bytes of the server")
    parser.add_argument("--seconds", type=float, default=8.0)
    given = parser.parse_args(arguments)
    print("| beside | requests | p50, ms | p99, ms | longest, ms |\n|---|---|---|---|---|")
    with server(f"limits.max_json_bytes={given.limit}") as port:
        for name, request in cases(given.limit).items():
            took, _ = measure(port, request, given.connections, given.seconds)
            p50, p99, most = np.percentile(np.array(took) * 1e3, (50, 99, 100))
            print(f"| {name} | {len(took)} | {p50:.1f} | {p99:.1f} | {most:.1f} |", flush=True)
    return 0


def rows(num_tokens: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    return np.random.default_rng(0).standard_normal((num_tokens, HIDDEN)).astype(np.float32)


def _send(connection: http.client.HTTPConnection, request: Request) -> None:
    connection.request("POST", PATH, request.body, request.headers)
    response = connection.getresponse()
    response.read()
    if response.status != request.status:
        raise RuntimeError(f"status: expected {request.status}, got {response.status}")


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/v2/health/ready")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
