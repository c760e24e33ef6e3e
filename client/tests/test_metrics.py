"""What a pool counts, and its metrics for Prometheus; without servers."""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from expertd_client import (
    DeadlineError,
    ExpertError,
    InvalidAnswerError,
    InvalidRequestError,
    ServerBusyError,
    ServerUnreachableError,
    UnknownModelError,
)
from expertd_client import pool as pool_module
from expertd_client.calls import layer_call
from expertd_client.deadline import Deadline
from expertd_client.engine import PluginSettings, RemoteServer
from expertd_client.metrics import PoolCollector, write_files
from expertd_client.outcomes import OUTCOMES
from expertd_client.pool import ServerPool, failures, pools
from expertd_client.steps import Sleep, Steps, run, run_async
from tests import programs
from tests.test_pool_rules import Server, X, infer, pool_of
from tests.waiting import wait_for

A, B = "http://a", "http://b"
Read = Callable[..., float | None]


class Listed:
    """A list of servers that changes."""

    def __init__(self) -> None:
        self.found = [A, B]

    def urls(self) -> list[str]:
        return self.found


def made(url: str) -> Any:
    return Server(url)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pools of other tests, and what they have counted."""
    for pool in pools():
        run(pool.close())
    monkeypatch.setattr(pool_module, "_failures", Counter())


@pytest.fixture
def value() -> Read:
    """Of a series, by the rest of its name and its labels; None: there is none."""
    registry = CollectorRegistry()
    registry.register(PoolCollector())
    return reader(registry)


def reader(registry: CollectorRegistry) -> Read:
    return lambda name, **labels: registry.get_sample_value(f"expertd_pool_{name}", labels)


@pytest.mark.parametrize(
    ("error", "outcome", "moves"),
    [
        (ServerUnreachableError("gone"), "unreachable", True),
        (ServerBusyError("shutting down", 503), "draining", True),
        (ServerBusyError("full", 503, 1.0), "full", True),
        (ServerBusyError("full", 429, 1.0), "full", True),
        (UnknownModelError("unloaded", 404), "unknown_model", True),
        (ServerBusyError("timeout: expected more, as the queue is long", 503), "timeout", False),
        (DeadlineError("timeout"), "timeout", False),
        (InvalidRequestError("wrong", 400), "error", False),
        (InvalidAnswerError("wrong"), "error", False),
        (ExpertError("failed", 500), "error", False),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
@pytest.mark.usefixtures("in_order")
def test_calls_are_counted_by_how_they_end(
    error: ExpertError, outcome: str, moves: bool, value: Read
) -> None:
    first, second = Server(A), Server(B)
    pool = pool_of(first, second)
    first.says = [error]
    if moves:
        infer(pool)
    else:
        with pytest.raises(type(error)):
            infer(pool)
    assert value("calls_total", server=A, outcome=outcome) == 1
    assert value("calls_total", server=B, outcome="answered") == moves
    assert sum(sum(state.ended.values()) for state in pool.states()) == 1 + moves
    assert value("failed_calls_total", reason=outcome) == (not moves)
    assert sum(failures().values()) == (not moves)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ServerUnreachableError("gone"), "unreachable"), (ServerBusyError("full", 503, 100.0), "full"),
        (ServerBusyError("shutting down", 503), "draining"),
    ],
)  # fmt: skip
def test_a_call_without_an_answer_fails_once(error: ExpertError, reason: str, value: Read) -> None:
    servers = [Server(A), Server(B)]
    pool = pool_of(*servers)
    for server in servers:
        server.says = [error]
    with pytest.raises(type(error)):
        infer(pool)
    assert [value("calls_total", server=url, outcome=reason) for url in (A, B)] == [1, 1]
    run(pool.close())  # or the counter would seem to have begun anew
    assert [value("failed_calls_total", reason=each) for each in OUTCOMES[1:]] == [
        each == reason for each in OUTCOMES[1:]
    ]


def test_calls_on_their_way_and_calls_that_are_given_up(value: Read) -> None:
    class Slow(Server):
        def infer(self, call: Any, deadline: Deadline) -> Steps[None]:
            yield Sleep(10, deadline)

    pool = pool_of(Slow(A))
    call = pool.infer(layer_call("m", X), Deadline(20))
    next(call)
    assert value("calls_in_flight", server=A) == 1
    call.close()
    assert value("calls_in_flight", server=A) == 0
    assert pool.states()[0].ended == {}
    assert failures() == {}


@pytest.mark.usefixtures("in_order")
def test_the_series_are_those_of_the_servers_of_now(value: Read) -> None:
    listed = Listed()
    pool = ServerPool(listed, made, 1.0, clock=lambda: 100.0)
    assert value("calls_total", server=A, outcome="full") == 0, "before any call"
    assert value("failed_calls_total", reason="unreachable") == 0
    infer(pool)
    pool.members[1].seconds = {2: (0.25, 100.0)}
    pool.mark(pool.members[0], "down")
    states = {state: value("servers", server=A, state=state) for state in ("up", "draining", "down")}
    assert states == {"up": 0, "draining": 0, "down": 1}
    assert value("servers", server=B, state="up") == 1
    assert value("expected_seconds", server=B) == 0.25
    listed.found = [B]
    pool.update()
    assert value("servers", server=A, state="down") is None
    assert value("calls_total", server=A, outcome="answered") is None
    assert value("servers", server=B, state="up") == 1
    run(pool.close())
    assert value("servers", server=B, state="up") is None


def test_pools_with_the_same_server_are_added_up(value: Read) -> None:
    found = [pool_of(Server(A)), pool_of(Server(A), Server(B))]
    for pool in found:
        infer(pool)
        infer(pool)
    found[0].mark(found[0].members[0], "down")
    assert value("servers", server=A, state="down") == 1
    assert value("servers", server=A, state="up") == 1
    calls = [value("calls_total", server=url, outcome="answered") for url in (A, B)]
    assert sum(number or 0 for number in calls) == 4


def test_threads_and_an_event_loop_lose_no_count(value: Read) -> None:
    pool = pool_of(Server(A))
    each = 300

    async def in_loop() -> None:
        calls = [pool.infer(layer_call("m", X), Deadline(60)) for _ in range(each)]
        await asyncio.gather(*map(run_async, calls))

    def in_thread() -> None:
        for _ in range(each):
            infer(pool)

    with ThreadPoolExecutor(5) as threads:
        begun = [threads.submit(in_thread) for _ in range(4)]
        begun.append(threads.submit(asyncio.run, in_loop()))
    for call in begun:
        call.result()
    assert value("calls_total", server=A, outcome="answered") == 5 * each
    assert value("calls_in_flight", server=A) == 0


def test_processes_are_added_up_in_multiprocess_mode(tmp_path: Path) -> None:
    """Each has files, in which a server that has gone is no more."""
    listed = Listed()
    pool = ServerPool(listed, made, 1.0, clock=lambda: 100.0)
    registry = CollectorRegistry()
    MultiProcessCollector(registry, tmp_path)
    value = reader(registry)
    infer(pool)
    pool.members[0].seconds = {1: (0.25, 100.0)}
    for pid in (1, 2):
        write_files(tmp_path, pid)
    assert value("servers", server=B, state="up") == 2
    assert value("expected_seconds", server=A) == 0.25
    assert value("failed_calls_total", reason="full") == 0
    assert sum(value("calls_total", server=url, outcome="answered") or 0 for url in (A, B)) == 2
    listed.found = [A]
    pool.update()
    write_files(tmp_path, 1)
    assert value("servers", server=B, state="up") == 1
    write_files(tmp_path, 2)
    assert value("servers", server=B, state="up") is None
    assert value("servers", server=A, state="up") == 2


PROGRAM = """
import os, sys

if sys.argv[1:]:
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
from prometheus_client import REGISTRY
from expertd_client.metrics import expose
from tests import programs
from tests.test_pool_rules import Server, infer, pool_of

pool = pool_of(Server("http://a"))
expose()
expose()
infer(pool)
infer(pool)
"""
FORK = """
child = os.fork()
infer(pool)
if child:
    os.waitpid(child, 0)
labels = {"server": "http://a", "outcome": "answered"}
print(REGISTRY.get_sample_value("expertd_pool_calls_total", labels), flush=True)
"""
STAY = """
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_each_side_of_a_fork_counts_its_own_calls() -> None:
    assert programs.run(PROGRAM + FORK).split() == ["1.0", "3.0"]


@pytest.mark.slow
def test_a_process_shows_its_pools_to_others(tmp_path: Path) -> None:
    """As those of an engine do to the one that answers /metrics."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, tmp_path)
    value = reader(registry)
    with programs.running(PROGRAM + STAY, str(tmp_path)) as program:
        assert program.says("ready")
        wait_for(lambda: value("calls_total", server=A, outcome="answered") == 2, "the calls are counted")
        assert value("servers", server=A, state="up") == 1


def test_an_engine_without_prometheus_client_has_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "servers"
    file.write_text(A)
    monkeypatch.delitem(sys.modules, "expertd_client.metrics")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    client = RemoteServer(PluginSettings(f"file:{file}")).client
    assert [server.url for server in client.servers()] == [A]
    client.close()
