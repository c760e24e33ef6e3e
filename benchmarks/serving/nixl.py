"""Channels over NIXL on one machine: `python -m benchmarks nixl [--json FILE]`.

A server's function is the identity on bf16 rows of 7168, which copies nothing: the way there and back is
measured. Rows have the medians in microseconds of a request at a time, and the requests of one token per
second if 16 are in flight. The ways take turns in each round, and a row has the medians of all rounds.

bare     NIXL alone: two agents in two processes write as many bytes into each other's memory, and poll
nixl     a channel over NIXL, or with --gpus a request of a tensor of a GPU
http     HTTP, from one connection or 16
channel  a channel in shared memory, which needs no network

--tls   what UCX may use: `tcp` takes the loopback interface, as a network without RDMA would
--gpus  the agents of `bare` are on two GPUs, and the tensors of callers on the first, for which `nixl` and
        `http` copy them to the host and back; the server has none. Takes less than two minutes
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from typing import Any

import numpy as np

from benchmarks.lib.caller import call_together, tokens_of
from benchmarks.lib.processes import free_port, running
from benchmarks.lib.run import Result, new_parser
from benchmarks.lib.timing import cpu_name
from benchmarks.serving.nixl_alone import alone
from expertd_client import ExpertClient

HIDDEN_SIZE = 7168
TOKENS = 1, 64, 4096
ON_LOOPBACK, ON_GPUS = ["tcp", "shm,self"], ["cuda_ipc,cuda_copy,tcp"]
IN_FLIGHT = 16
_FEWEST = 5  # calls
Call = Callable[[], object]


@contextmanager
def channel(url: str, num_tokens: int, over_nixl: bool) -> Iterator[Call]:
    """A request over a channel, whose slot has its rows already."""
    with (
        ExpertClient(url) as client,
        client.open_channel(
            "moe", max_tokens=num_tokens, num_slots=1, datatype="BF16", over_nixl=over_nixl
        ) as opened,
    ):
        (slot,) = opened.slots
        slot.hidden_states[:] = tokens_of(num_tokens, HIDDEN_SIZE)
        yield lambda: opened.wait(opened.submit(slot, num_tokens))


@contextmanager
def http(url: str, num_tokens: int) -> Iterator[Call]:
    """A request over HTTP."""
    rows = tokens_of(num_tokens, HIDDEN_SIZE)
    out = np.empty_like(rows)
    with ExpertClient(url, transport="http") as client:
        yield lambda: client.infer("moe", rows, out=out)


@contextmanager
def of_gpu(url: str, num_tokens: int, transport: Any) -> Iterator[Call]:
    """A request of a tensor in a GPU's memory, until the output is there."""
    import torch

    rows = torch.from_numpy(tokens_of(num_tokens, HIDDEN_SIZE)).view(torch.bfloat16).to("cuda:0")
    out = torch.empty_like(rows)

    def call() -> None:
        client.infer("moe", rows, out=out)
        torch.cuda.synchronize(0)

    with ExpertClient(url, transport=transport) as client:
        yield call


def ways(url: str, num_tokens: int, on_gpus: bool) -> dict[str, Any]:
    """What takes turns."""
    num_bytes = 2 * HIDDEN_SIZE * num_tokens
    if on_gpus:
        gpus: dict[str, Any] = {name: of_gpu(url, num_tokens, name) for name in ("nixl", "http")}
        return {"bare": alone(num_bytes, (0, 1)), **gpus}
    return {
        "bare": alone(num_bytes),
        "nixl": channel(url, num_tokens, over_nixl=True),
        "http": http(url, num_tokens),
        "channel": channel(url, num_tokens, over_nixl=False),
    }


def median_of(call: Call, seconds: float) -> float:
    """Microseconds of a call."""
    for _ in range(_FEWEST):
        call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < _FEWEST or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)


def rate(url: str, over_nixl: bool, seconds: float) -> float:
    """Requests of one token per second, `IN_FLIGHT` at a time, of one process."""
    given: dict[str, Any] = {"url": url, "models": ["moe"], "tokens": 1, "hidden_size": HIDDEN_SIZE}
    if over_nixl:
        given |= {"way": "channel", "over_nixl": True, "slots": IN_FLIGHT, "spin": 0}
    else:
        given |= {"way": "http", "connections": IN_FLIGHT}
    return len(call_together(given, seconds, lead=seconds / 4)) / seconds


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each way."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every row as it is measured, and write all of them to a file if asked to."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a measurement")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--tls", nargs="+", help=f"default: {' '.join(ON_LOOPBACK)}, or {ON_GPUS[0]}")
    parser.add_argument("--gpus", action="store_true")
    given = parser.parse_args(arguments)
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "nixl": metadata.version("nixl-cu13"),
        "seconds": given.seconds,
        "rounds": given.rounds,
    }
    if given.gpus:
        import torch

        if (count := torch.cuda.device_count()) < 2:
            parser.exit(1, f"nixl: expected two GPUs, got {count}\n")
        machine["gpu"] = torch.cuda.get_device_name(0)
    result = Result(given.json, machine)
    for tls in given.tls or (ON_GPUS if given.gpus else ON_LOOPBACK):
        os.environ["UCX_TLS"] = tls
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = "-m", "benchmarks.serving.cpu_servers", "expertd", str(port), str(HIDDEN_SIZE)
        with running(command, port, OMP_NUM_THREADS="1"):
            for num_tokens in given.tokens:
                with ExitStack() as stack:
                    calls = {
                        name: stack.enter_context(way)
                        for name, way in ways(url, num_tokens, given.gpus).items()
                    }
                    took = medians(
                        [
                            {name: median_of(call, given.seconds) for name, call in calls.items()}
                            for _ in range(given.rounds)
                        ]
                    )
                row: dict[str, Any] = {"tls": tls, "tokens": num_tokens, **took}
                if num_tokens == 1 and not given.gpus:
                    row |= medians(
                        [
                            {
                                f"{name}_per_s": rate(url, name == "nixl", given.seconds)
                                for name in ("nixl", "http")
                            }
                            for _ in range(given.rounds)
                        ]
                    )
                result.put(row)
    return 0
