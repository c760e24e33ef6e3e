"""Servers with ranks in processes of their own: drains, and ends of any kind, that leave nothing behind."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from expertd.service.ranks.front import group
from expertd.service.ranks.front.rank import Rank
from expertd.service.ranks.setup import STOP
from tests.service.apps import hidden_request, rows, tiny_settings
from tests.service.http.processes import alive, two_processes
from tests.service.processes import EXPERTD, ServerProcess, clean_environment, server_process, started
from tests.service.ranks.servers import rank_processes, serving_ranks
from tests.service.sockets import Answer, connect, infer, read_answer
from tests.service.waiting import wait_for

pytestmark = pytest.mark.slow  # server processes

LARGE = {"name": "large", "hidden_size": 4096, "intermediate_size": 4096, "num_experts": 32, "top_k": 2}


@contextmanager
def _server(directory: Path, fork: bool = True, **changes: Any) -> Iterator[tuple[ServerProcess, list[int]]]:
    """A server with two ranks, and their processes."""
    with server_process(tiny_settings(ranks=2, **changes), directory, fork) as server:
        ranks = rank_processes(server.process.pid)
        assert len(ranks) == 2
        yield server, ranks


def _ended(processes: list[int]) -> Callable[[], bool]:
    return lambda: not any(alive(process) for process in processes)


@pytest.mark.parametrize(
    ("number", "seconds", "what"),
    [
        (signal.SIGUSR1, 60, "its process ended by SIGUSR1"),  # without a core dump
        (None, 1, "expected it to end within 1 s; it was killed"),
    ],
)
async def test_a_rank_that_does_not_end_well_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    number: signal.Signals | None,
    seconds: float,
    what: str,
) -> None:
    monkeypatch.setattr(group, "_STOP_SECONDS", seconds)
    send = Rank.send

    def send_other(rank: Rank, *message: Any, **more: Any) -> None:
        """As `send`, but a signal or nothing instead of STOP."""
        if message != (STOP,):
            send(rank, *message, **more)
        elif number is not None:
            rank.process.send_signal(number)

    monkeypatch.setattr(Rank, "send", send_other)
    with caplog.at_level("WARNING"):
        async with serving_ranks(tiny_settings(ranks=2)):
            pass
    assert sorted(record.message for record in caplog.records) == [
        f"shutting down: rank {rank}: {what}" for rank in range(2)
    ]


def test_ranks_end_with_the_server(tmp_path: Path) -> None:
    with _server(tmp_path) as (server, ranks):
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        assert _ended(ranks)()
        assert not re.search("WARNING|ERROR", server.log())


def test_sigterm_to_every_process_is_one_signal(tmp_path: Path) -> None:
    """As systemd sends it: what was accepted is answered."""
    with _server(tmp_path, shutdown_delay_seconds=2) as (server, ranks), ExitStack() as stack:
        callers = [stack.enter_context(connect(server.port)) for _ in range(8)]
        for caller in callers:
            caller.sendall(infer(*hidden_request(rows(50))))
        for process in (*ranks, server.process.pid):
            os.kill(process, signal.SIGTERM)
        for caller in callers:
            assert read_answer(caller).status == 200
        assert server.process.wait(60) == 0
        assert _ended(ranks)()
        assert not re.search("WARNING|ERROR", server.log())


@pytest.mark.thorough  # new processes import torch
def test_ranks_end_with_a_front_end_that_is_killed(tmp_path: Path) -> None:
    with _server(tmp_path, fork=False) as (server, ranks):  # whose parent it is
        server.process.kill()
        server.process.wait()
        wait_for(_ended(ranks), "the ranks end")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)])
def test_ranks_that_load_end_with_the_server(number: signal.Signals, code: int, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    settings = tiny_settings(ranks=2, models=[LARGE], port=0)
    config.write_text(yaml.safe_dump(settings.model_dump(mode="json")))
    with (tmp_path / "log").open("wb") as log:
        server = started([EXPERTD, "serve", "--config", config], log, clean_environment())
    try:
        loading = "rank 0: loading model large"
        wait_for(lambda: loading in (tmp_path / "log").read_text(), "the ranks load", 300)
        wait_for(lambda: len(rank_processes(server.pid)) == 2, "both are started")
        ranks = rank_processes(server.pid)
        server.send_signal(number)
        assert server.wait(60) == code
        wait_for(_ended(ranks), "the ranks end")
    finally:
        server.kill()
        server.wait()


def _answer(server: ServerProcess, status: int) -> Answer | None:
    """The answer to a request, if it has this status."""
    with connect(server.port) as caller:
        caller.sendall(infer(*hidden_request(rows(5))))
        answer = read_answer(caller)
    return answer if answer.status == status else None


def test_several_http_processes_share_the_ranks(tmp_path: Path) -> None:
    settings = two_processes(ranks=2)
    with server_process(settings, tmp_path) as server:
        ranks = rank_processes(server.process.pid)
        answers = [wait_for(lambda: _answer(server, 200), "an answer") for _ in range(2)]
        assert answers[0].body == answers[1].body
        os.kill(ranks[1], signal.SIGKILL)
        refused = wait_for(lambda: _answer(server, 503), "a request is refused")
        assert refused.headers["retry-after"] == "1"
        again = wait_for(lambda: _answer(server, 200), "the ranks are back")
        assert again.body == answers[0].body
        ranks += rank_processes(server.process.pid)
        server.terminate()
        assert server.process.wait(60) == 0
        assert _ended(ranks)()
