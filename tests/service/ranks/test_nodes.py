"""Two nodes, as two groups of processes on loopback: answers, losses, starts and ends of any kind."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expertd.service.ranks.front import supervisor
from expertd.service.ranks.front.loading import load_ranks
from expertd.service.ranks.nodes import board as nodes
from tests.service.apps import MODEL, Serving, error_of, rows, serving, tiny_settings
from tests.service.channels.servers import claimed
from tests.service.http.processes import GOOD, alive, asked, connected
from tests.service.processes import server_process
from tests.service.ranks.hanging import allow_hanging, hang
from tests.service.ranks.nodes import Agent, agent, node_settings
from tests.service.ranks.servers import (
    check_steps_at_once,
    close,
    output_for,
    rank_processes,
    serving_ranks,
)
from tests.service.ranks.steps import LIMITS, outputs_of, request, routed
from tests.service.ranks.traffic import traffic_to
from tests.service.sockets import connect, read_answer
from tests.service.waiting import until, wait_for

pytestmark = pytest.mark.slow  # each server starts processes


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
async def test_answers_are_those_of_one_process(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = node_settings(LIMITS, ranks=ranks, channels={"socket": str(tmp_path / "channels")})
    with agent(settings, tmp_path) as other:
        async with serving(tiny_settings(LIMITS)) as one, serving_ranks(settings) as server:
            assert len(other.ranks()) == ranks
            assert len(rank_processes()) == 2 * ranks, "its own ranks, and a proxy for each other one"
            await check_steps_at_once(server, one, monkeypatch)  # before small requests come
            for num_tokens in (1, 2, 3, 5, 64, 1000):  # fewer than ranks, and more
                values = rows(num_tokens, seed=num_tokens)
                assert close(await output_for(server, values), await output_for(one, values)), num_tokens
                for datatype in ("INT32", "INT64"):
                    assert close(await routed(server, values, datatype), await routed(one, values, datatype))
            step = [
                request(rows(3), "BF16", "FP32"),
                request(rows(1, 1), "FP32", "BF16"),
                request(rows(5, 2), "FP16", "FP32", given=True),
            ]
            expected, got = await outputs_of(one, step), await outputs_of(server, step)
            assert all(map(close, got, expected))
            peer = await claimed(server)
            for num_tokens in (1, 16):
                values = rows(num_tokens, num_tokens)
                assert close(await asyncio.to_thread(peer.infer, values), await output_for(one, values))
            peer.close()
            computed = [
                server.metric("rank_expert_tokens_total", rank=str(rank)) for rank in range(2 * ranks)
            ]
            assert all(computed)


def kill_a_rank(other: Agent) -> None:
    os.kill(other.ranks()[0], signal.SIGKILL)


def stop_a_rank(other: Agent) -> None:
    os.kill(other.ranks()[0], signal.SIGSTOP)


def kill_a_proxy(other: Agent) -> None:
    os.kill(rank_processes()[1], signal.SIGKILL)


def kill_a_rank_of_node_0(other: Agent) -> None:
    os.kill(rank_processes()[0], signal.SIGKILL)


def hang_a_rank(other: Agent) -> None:
    hang(other.ranks()[0])


def silence_the_agent(other: Agent) -> None:
    os.kill(other.process.pid, signal.SIGSTOP)


def let_it_speak(other: Agent) -> None:
    os.kill(other.process.pid, signal.SIGCONT)


@dataclass(frozen=True)
class Loss:
    """What is done; why the server is not ready; what is done then."""

    lose: Callable[[Agent], None]
    why: str
    undo: Callable[[Agent], None] = lambda _: None


HANGS = "a rank hangs: expected the end of a step within 1.5 s"
SILENT = "node 1: expected a sign of its agent within 3 s, got none"


@pytest.mark.thorough
async def test_a_lost_rank_costs_no_request_its_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One loss after another, each of ranks that have come back from the one before."""
    monkeypatch.setattr(supervisor, "_LAST_PAUSE", 0.2)  # else it would grow with each loss
    allow_hanging(tmp_path, monkeypatch)
    settings = node_settings(step_timeout_seconds=1.5)
    with agent(settings, tmp_path) as other:
        async with serving_ranks(settings) as server, asyncio.timeout(240):
            for loss in (
                Loss(kill_a_rank, "rank 1: its process ended by SIGKILL (node 1)"),
                Loss(stop_a_rank, "rank 1: its process was stopped (node 1)"),
                Loss(kill_a_proxy, "rank 1: its proxy's process ended by SIGKILL"),
                Loss(kill_a_rank_of_node_0, "rank 0: its process ended by SIGKILL"),
                Loss(hang_a_rank, HANGS),
                Loss(silence_the_agent, SILENT, undo=let_it_speak),
            ):
                await check_loss(server, other, loss)


async def check_loss(server: Serving, other: Agent, loss: Loss) -> None:
    """Under traffic: the server says why it is not ready, all ranks are replaced, and nothing is wrong."""
    async with traffic_to(server) as traffic:
        before = [*rank_processes(), *other.ranks()]
        loss.lose(other)
        await until(lambda: server.app.engine.why_not_ready() is not None)
        assert loss.why in error_of(await server.http.get("/v2/health/ready"), 503)
        loss.undo(other)
        await traffic.flows_again()
        assert not any(map(alive, before)), "the whole group is new"
    assert traffic.wrong == [], loss.why
    assert traffic.refused > 0, loss.why


async def test_a_rank_that_ends_before_it_says_anything_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = node_settings()
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        (tmp_path / "sitecustomize.py").write_text(
            "import os, sys\nif '--node-rank' not in sys.orig_argv: os._exit(7)\n"
        )
        other = Agent(settings, tmp_path)
    try:
        expected = r"loading: rank 1: its process ended with exit code 7 \(node 1\)"
        with pytest.raises(RuntimeError, match=expected):
            await asyncio.to_thread(load_ranks, settings, lambda: False)
    finally:
        other.kill()


def test_an_agent_that_takes_a_place_while_others_are_waited_for_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The beats of both alternate until the first one ends: the last one that was seen may be its own."""
    beats = iter(["first:1", "first:2", "first:2", "second:1"])
    board: Any = SimpleNamespace(
        describe=lambda shared: None,
        beats=lambda num_nodes: {1: next(beats)},
        refusals=lambda num_nodes: [],
        report_of=lambda generation, node: None,
    )
    monkeypatch.setattr(nodes, "Board", lambda rendezvous: board)
    rendezvous: Any = None
    seen = nodes.Nodes(node_settings(), rendezvous)
    assert [seen.why_lost() for _ in range(2)] == [None, None]
    seen.wait_present(lambda: False, is_first=False)
    (message,) = caplog.messages
    assert message.startswith("node 1: another agent has taken the place of one that was there 0.")


_REPLACED = "node 1: another agent has taken the place of one that was there "
_TAKEN = r"rendezvous: expected a free port on an address of node 0, got 127\.0\.0\.1:"


def test_a_drain_of_all_nodes_at_once_answers_what_was_accepted(tmp_path: Path) -> None:
    """As an orchestrator ends them: the agent has its signal first."""
    settings = node_settings(shutdown_delay_seconds=2.0)
    with (
        agent(settings, tmp_path) as other,
        server_process(settings, tmp_path) as server,
        ExitStack() as stack,
    ):
        ranks = [*rank_processes(server.process.pid), *other.ranks()]
        socks = connected(stack, server, 8)
        other.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        for sock in socks:
            sock.sendall(GOOD)
        assert [read_answer(sock).status for sock in socks] == [200] * 8, "accepted within the delay"
        assert server.process.wait(60) == 0
        assert other.process.wait(60) == 0
        assert not any(map(alive, ranks))
        assert "ERROR" not in server.log() + other.log()


async def test_both_sides_say_that_an_agent_was_stopped(tmp_path: Path) -> None:
    settings = node_settings(drain_timeout_seconds=0.1)
    stopped = "the agent was stopped by SIGTERM"
    with agent(settings, tmp_path) as other:
        async with serving_ranks(settings) as server:
            other.process.send_signal(signal.SIGTERM)
            await until(lambda: server.app.engine.why_not_ready() is not None)
            expected = f"{stopped} (node 1); the ranks are starting again"
            await until(lambda: server.app.engine.why_not_ready() == expected)
            assert await asyncio.to_thread(other.process.wait, 60) == 0
            assert f"the ranks of node 1 have ended: {stopped}\n" in other.log()


def test_a_signal_ends_an_agent_that_has_no_ranks(tmp_path: Path) -> None:
    with agent(node_settings(), tmp_path) as other:
        wait_for(lambda: "waiting 120 s for the front end" in other.log(), "the agent waits")
        other.process.send_signal(signal.SIGTERM)
        assert other.process.wait(60) == 0


def test_an_agent_ends_if_no_front_end_comes(tmp_path: Path) -> None:
    with agent(node_settings(rendezvous_timeout_seconds=0.5), tmp_path) as other:
        assert other.process.wait(60) == 1
        assert "rendezvous: expected a front end within 0.5 s, got none" in other.log()


@pytest.mark.thorough  # new processes import torch
def test_an_agent_outlives_its_front_end(tmp_path: Path) -> None:
    settings = node_settings()
    with agent(settings, tmp_path, fork=False) as other:
        with server_process(settings, tmp_path) as server:
            ranks = other.ranks()
            server.process.kill()
            wait_for(lambda: not any(map(alive, ranks)), "the ranks end")
        wait_for(lambda: other.log().count("waiting 120 s for the front end") == 2, "the agent waits again")
        with server_process(settings, tmp_path) as server:
            with connect(server.port) as sock:
                assert asked(sock, GOOD).status == 200
            assert set(other.ranks()).isdisjoint(ranks)
        assert "frame #" not in other.log(), "torch's store traces no stack"


def test_a_front_end_ends_if_a_node_does_not_come(caplog: pytest.LogCaptureFixture) -> None:
    expected = r"node 1: expected an agent within 1\.5 s, got none"
    caplog.set_level(logging.INFO, "expertd.service.ranks.nodes.board")
    with pytest.raises(ValueError, match=expected):
        load_ranks(node_settings(rendezvous_timeout_seconds=1.5), lambda: False)
    assert caplog.messages.count("waiting 1.5 s for node 1") == 1
    assert rank_processes() == []


def test_a_node_with_other_settings_is_refused(tmp_path: Path) -> None:
    settings = node_settings()
    differs = settings.model_validate({**settings.model_dump(), "models": [{**MODEL, "num_experts": 8}]})
    with agent(differs, tmp_path) as other:
        refused = "models.0.num_experts: expected on node 1 what node 0 has, 4, got 8"
        with pytest.raises(ValueError, match=refused):
            load_ranks(settings, lambda: False)
        assert other.process.wait(60) == 2
        assert refused in other.log()


@pytest.mark.thorough
async def test_a_lost_node_is_waited_for_and_agents_follow_one_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One takes the place of another; one that does not fit is refused; one that fits may follow it."""
    settings = node_settings()
    differs = settings.model_validate({**settings.model_dump(), "models": [{**MODEL, "num_experts": 8}]})
    with agent(settings, tmp_path, "first") as first:
        async with serving_ranks(settings) as server, asyncio.timeout(240), traffic_to(server) as traffic:
            with agent(settings, tmp_path, "second") as second:
                assert await asyncio.to_thread(first.process.wait, 60) == 2
                assert "node 1: expected one agent, got another one" in first.log()
                await until(lambda: any(text.startswith(_REPLACED) for text in caplog.messages))
                await until(
                    lambda: server.app.engine.why_not_ready() is None and len(second.ranks()) == 1, 30
                )
                ranks = second.ranks()
                second.process.kill()
                await until(lambda: server.app.engine.why_not_ready() is not None)
                await until(lambda: not any(map(alive, ranks)))
            with agent(differs, tmp_path, "wrong") as wrong:
                assert await asyncio.to_thread(wrong.process.wait, 60) == 2
            with agent(settings, tmp_path, "right"):
                await traffic.flows_again()
        assert traffic.wrong == []


def test_a_port_that_is_taken_is_reported() -> None:
    settings = node_settings()
    assert settings.rendezvous is not None
    host, _, port = settings.rendezvous.partition(":")
    with socket.create_server((host, int(port))), pytest.raises(ValueError, match=_TAKEN):
        load_ranks(settings, lambda: False)
