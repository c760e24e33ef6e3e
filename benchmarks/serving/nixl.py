"""Channels over NIXL on one machine: `python -m benchmarks nixl [--json FILE]`.

A server's function is the identity on bf16 rows of 7168, so what is measured is the way there and back. Rows
have the medians in microseconds of a request at a time: of NIXL alone, where two agents in two processes
write as many bytes into each other's memory, and poll; of a channel over NIXL; of HTTP; and of a channel
in shared memory, which needs no network. They take turns in each round, and a row has the medians of all
rounds. UCX_TLS=tcp (the default here) takes the loopback interface, as a network without RDMA would.
"""

import mmap
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.lib.caller import tokens_of
from benchmarks.lib.processes import free_port, running
from benchmarks.lib.run import Result, new_parser
from benchmarks.lib.timing import cpu_name
from expertd_client import ExpertClient
from expertd_client.nixl.agent import Agent

HIDDEN_SIZE = 7168
TOKENS = (1, 64, 4096)
SECONDS = 1.0  # of a measurement
_FEWEST = 5  # calls
Call = Callable[[], object]


def agent_of(pipe: Connection, num_bytes: int) -> Agent:
    """An agent that has met the one at the other end of a pipe."""
    memory = mmap.mmap(-1, num_bytes)
    agent = Agent(memory)
    pipe.send(agent.described())
    agent.connect(pipe.recv())
    return agent


def there(agent: Agent, num_bytes: int) -> None:
    """Write a part of the memory to the other side."""
    agent.write(((0, num_bytes),), b"\1")
    while agent.is_writing:
        agent.advance()


def receive(agent: Agent) -> bytes:
    """The next message."""
    while not (messages := agent.receive()):
        os.sched_yield()
    return messages[0]


def answer_all(pipe: Connection, num_bytes: int) -> None:
    """The other side of `bare`: writes back as many bytes as come, until the message 0."""
    agent = agent_of(pipe, num_bytes)
    while receive(agent) != b"\0":
        there(agent, num_bytes)


@contextmanager
def bare(num_tokens: int) -> Iterator[Call]:
    """NIXL alone."""
    context, num_bytes = multiprocessing.get_context("spawn"), 2 * HIDDEN_SIZE * num_tokens
    pipe, other = context.Pipe()
    process = context.Process(target=answer_all, args=(other, num_bytes), daemon=True)
    process.start()
    agent = agent_of(pipe, num_bytes)

    def call() -> None:
        there(agent, num_bytes)
        receive(agent)

    yield call
    agent.send(b"\0")
    process.join()


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


def median_of(call: Call) -> float:
    """Microseconds of a call."""
    for _ in range(_FEWEST):
        call()
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < _FEWEST or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print every row as it is measured, and write all of them to a file if asked to."""
    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args(arguments)
    os.environ.setdefault("UCX_TLS", "tcp")
    machine = {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "nixl": metadata.version("nixl-cu13"),
        "ucx_tls": os.environ["UCX_TLS"],
    }
    result, port = Result(given.json, machine), free_port()
    url = f"http://127.0.0.1:{port}"
    command = "-m", "benchmarks.serving.cpu_servers", "expertd", str(port), str(HIDDEN_SIZE)
    with running(command, port, OMP_NUM_THREADS="1"):
        for num_tokens in TOKENS:
            with ExitStack() as stack:
                ways = {
                    "bare": bare(num_tokens),
                    "nixl": channel(url, num_tokens, over_nixl=True),
                    "http": http(url, num_tokens),
                    "channel": channel(url, num_tokens, over_nixl=False),
                }
                calls = {name: stack.enter_context(way) for name, way in ways.items()}
                rounds = [
                    {name: median_of(call) for name, call in calls.items()} for _ in range(given.rounds)
                ]
            row: dict[str, Any] = {"tokens": num_tokens}
            row |= {name: statistics.median(each[name] for each in rounds) for name in calls}
            result.put(row)
    return 0
