"""Starts and ends of nodes: drains, a front end that comes back, agents that do not fit."""

import asyncio
import logging
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from expertd.service.ranks.front.loading import load_ranks
from tests.service.apps import MODEL
from tests.service.http.processes import GOOD, alive, asked, connected
from tests.service.processes import server_process
from tests.service.ranks.nodes import agent, node_settings
from tests.service.ranks.servers import rank_processes, serving_ranks
from tests.service.ranks.traffic import traffic_to
from tests.service.sockets import connect
from tests.service.waiting import until, wait_for

pytestmark = pytest.mark.slow  # server processes

_REPLACED = "node 1: another agent has taken the place of one that was there "
_TAKEN = r"rendezvous: expected a free port on an address of node 0, got 127\.0\.0\.1:"


def test_a_drain_of_all_nodes_at_once_answers_what_was_accepted(tmp_path: Path) -> None:
    """As an orchestrator ends them: the agent has its signal first."""
    settings = node_settings(shutdown_delay_seconds=1.0)
    with (
        agent(settings, tmp_path) as other,
        server_process(settings, tmp_path) as server,
        ExitStack() as stack,
    ):
        ranks = [*rank_processes(server.process.pid), *other.ranks()]
        socks = connected(stack, server, 20)
        other.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        assert [asked(sock, GOOD).status for sock in socks] == [200] * 20, "within the delay"
        assert server.process.wait(20) == 0
        assert other.process.wait(20) == 0
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
            assert await asyncio.to_thread(other.process.wait, 20) == 0
            assert f"the ranks of node 1 have ended: {stopped}\n" in other.log()


def test_a_signal_ends_an_agent_that_has_no_ranks(tmp_path: Path) -> None:
    with agent(node_settings(), tmp_path) as other:
        wait_for(lambda: "waiting 30 s for the front end" in other.log(), "the agent waits")
        other.process.send_signal(signal.SIGTERM)
        assert other.process.wait(5) == 0


def test_an_agent_ends_if_no_front_end_comes(tmp_path: Path) -> None:
    with agent(node_settings(rendezvous_timeout_seconds=0.5), tmp_path) as other:
        assert other.process.wait(20) == 1
        assert "rendezvous: expected a front end within 0.5 s, got none" in other.log()


def test_an_agent_outlives_its_front_end(tmp_path: Path) -> None:
    settings = node_settings()
    with agent(settings, tmp_path, fork=False) as other:
        with server_process(settings, tmp_path) as server:
            ranks = other.ranks()
            server.process.kill()
            wait_for(lambda: not any(map(alive, ranks)), "the ranks end", 5)
        wait_for(lambda: other.log().count("waiting 30 s for the front end") == 2, "the agent waits again")
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
        assert other.process.wait(20) == 2
        assert refused in other.log()


async def test_a_lost_node_is_waited_for_and_agents_follow_one_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One takes the place of another; one that does not fit is refused; one that fits may follow it."""
    settings = node_settings()
    differs = settings.model_validate({**settings.model_dump(), "models": [{**MODEL, "num_experts": 8}]})
    with agent(settings, tmp_path, "first") as first:
        async with serving_ranks(settings) as server, asyncio.timeout(120), traffic_to(server) as traffic:
            with agent(settings, tmp_path, "second") as second:
                assert await asyncio.to_thread(first.process.wait, 20) == 2
                assert "node 1: expected one agent, got another one" in first.log()
                await until(lambda: any(text.startswith(_REPLACED) for text in caplog.messages))
                await until(
                    lambda: server.app.engine.why_not_ready() is None and len(second.ranks()) == 1, 30
                )
                ranks = second.ranks()
                second.process.kill()
                await until(lambda: server.app.engine.why_not_ready() is not None)
                await until(lambda: not any(map(alive, ranks)), 5)
            with agent(differs, tmp_path, "wrong") as wrong:
                assert await asyncio.to_thread(wrong.process.wait, 20) == 2
            with agent(settings, tmp_path, "right"):
                await traffic.flows_again()
        assert traffic.wrong == []


def test_a_port_that_is_taken_is_reported() -> None:
    settings = node_settings()
    assert settings.rendezvous is not None
    host, _, port = settings.rendezvous.partition(":")
    with socket.create_server((host, int(port))), pytest.raises(ValueError, match=_TAKEN):
        load_ranks(settings, lambda: False)
