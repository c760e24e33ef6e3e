"""Ranks that go on without one that is lost, and take it back."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from expertd.service.engine.errors import DeviceLostError
from expertd.service.memory import Arena, host_view
from expertd.service.moe.request import LayerRequest
from expertd.service.ranks import carrying
from expertd.service.ranks.returning import Returning
from expertd.service.settings.model import Settings
from tests.service.apps import HIDDEN, Serving, error_of, output_of, rows, serving, tiny_settings
from tests.service.ranks.placing import ONE_EACH, SMALL, Traffic, change, held, placement, routed, uniform
from tests.service.ranks.servers import close, output_for, rank_processes, serving_ranks
from tests.service.ranks.test_failed_steps import step_with_room_for
from tests.service.waiting import until

pytestmark = pytest.mark.slow  # each server starts processes

# Each step uses one replica of an expert, so that GEMMs have the same heights with any number of ranks: then
# a row has the same bits on any CPU.
SHRINKING = {
    "on_rank_loss": "shrink",
    "placement": {"policy": "static", "replicas": 8, "objective": "activated"},
}


def shrinking(ranks: int, **more: Any) -> Settings:
    layer = {**SMALL, "num_shared_experts": 0}
    return tiny_settings(ONE_EACH, ranks=ranks, models=[layer], **{**SHRINKING, **more})


def up(server: Serving, ranks: int) -> list[float]:
    return [server.metric("rank_up", rank=str(rank)) for rank in range(ranks)]


async def lose(server: Serving, rank: int, number: signal.Signals, ranks: int) -> float:
    """The seconds until the others serve."""
    os.kill(processes(server)[rank], number)
    began = time.perf_counter()
    await until(lambda: up(server, ranks)[rank] == 0 and server.app.engine.why_not_ready() is None, 10)
    return time.perf_counter() - began


def processes(server: Serving) -> dict[int, int]:
    """The process of each rank that is up, or that starts."""
    loaded: Any = server.app.engine.loaded
    group = loaded.runners["tiny"]._steps.supervisor.group()
    return {rank.number: rank.process.pid for rank in group.ranks}


def bodies() -> Sequence[tuple[bytes, int]]:
    return [routed(uniform(256, seed), seed) for seed in range(3)]


@pytest.mark.parametrize(
    ("ranks", "rank", "number"),
    [
        (2, 0, signal.SIGKILL),
        (2, 1, signal.SIGKILL),
        (2, 0, signal.SIGSTOP),
        (2, 1, signal.SIGSTOP),
        (4, 2, signal.SIGKILL),
    ],
)
async def test_the_others_go_on_and_take_a_lost_rank_back(
    ranks: int, rank: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving_ranks(shrinking(ranks)) as server, asyncio.timeout(60):
        async with Traffic(server, bodies()) as traffic:
            await traffic.more()
            before, others = processes(server), [other for other in range(ranks) if other != rank]
            with monkeypatch.context() as held_back:
                held_back.setattr(Returning, "look", lambda _: None)
                assert await lose(server, rank, number, ranks) < 2.0
                assert up(server, ranks) == [float(other != rank) for other in range(ranks)]
                assert processes(server) == {other: before[other] for other in others}
                await traffic.more()
                assert server.metric("rank_starts_total", rank=str(rank)) == 1
                await shows_the_loss(server, rank)
            await until(lambda: up(server, ranks) == [1.0] * ranks, 30)
            after = processes(server)
            assert {other: after[other] for other in others} == {other: before[other] for other in others}
            await traffic.more()
        assert traffic.wrong == []
        assert traffic.longest < 5.0
        starts = [server.metric("rank_starts_total", rank=str(other)) for other in range(ranks)]
        assert starts == [1.0 + (other == rank) for other in range(ranks)]
        assert server.metric("step_failures_total", model="tiny") == 0
        assert all(shown["up"] for shown in (await placement(server))["models"]["tiny"]["ranks"])
        await change(server, action="rebalance")


async def shows_the_loss(server: Serving, rank: int) -> None:
    """GET /v1/placement says which rank is down, and POST refuses to change anything."""
    layer = (await placement(server))["models"]["tiny"]
    assert [shown["up"] for shown in layer["ranks"]] == [at != rank for at in range(len(layer["ranks"]))]
    loads = [shown["load"] for shown in layer["ranks"]]
    assert loads[rank] == 0
    assert sum(loads) == pytest.approx(sum(layer["loads"]))
    there = [load for at, load in enumerate(loads) if at != rank]
    assert layer["max_over_mean"] == pytest.approx(max(there) / np.mean(there))
    ranks = [shown["experts"] for shown in layer["ranks"]]
    for body in ({"action": "rebalance"}, {"action": "pin", "model": "tiny", "ranks": ranks}):
        refused = await server.http.post("/v1/placement", json=body)
        assert error_of(refused, 503) == f"rank {rank} is lost, and is starting again beside the others"
        assert refused.headers["retry-after"] == "1"
    assert server.metric("placement_failures_total") == 0


async def test_answers_are_those_of_one_process() -> None:
    layer = {**SMALL, "num_shared_experts": 1}
    inexact = {"models": [layer], "exact_combine": False, "placement": {"policy": "static", "replicas": 8}}
    async with (
        serving(tiny_settings(ONE_EACH, models=[layer])) as one,
        serving_ranks(tiny_settings(ONE_EACH, ranks=2, on_rank_loss="shrink", **inexact)) as server,
    ):
        body = routed(uniform(200, 1))
        expected = output_of(await one.infer(*body))
        for rank in (0, 1):
            assert close(output_of(await server.infer(*body)), expected)
            await lose(server, rank, signal.SIGKILL, 2)
            assert close(output_of(await server.infer(*body)), expected)
            await until(lambda: up(server, 2) == [1.0, 1.0], 30)
        assert close(output_of(await server.infer(*body)), expected)


async def test_ranks_are_lost_in_turn_as_long_as_the_others_hold_all_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks 0 and 2 of four hold one half of the experts, 1 and 3 the other."""
    async with serving_ranks(shrinking(4)) as server, asyncio.timeout(60):
        async with Traffic(server, bodies()) as traffic:
            before = processes(server)
            with monkeypatch.context() as held_back:
                held_back.setattr(Returning, "look", lambda _: None)
                await lose(server, 0, signal.SIGKILL, 4)
                await lose(server, 1, signal.SIGKILL, 4)
                assert processes(server) == {2: before[2], 3: before[3]}
                await traffic.more()
            await until(lambda: up(server, 4) == [1.0] * 4, 30)
            await traffic.more()
            with monkeypatch.context() as held_back:
                held_back.setattr(Returning, "look", lambda _: None)
                await lose(server, 0, signal.SIGKILL, 4)
                os.kill(before[2], signal.SIGKILL)
                await until(lambda: up(server, 4) == [1.0] * 4, 30)
            await traffic.more()
            assert not set(before.values()) & set(rank_processes()), "the whole group is new"
        assert traffic.wrong == []


async def test_a_rank_is_lost_while_experts_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying.SliceSize, "note", lambda *_: None)
    monkeypatch.setattr(carrying, "_FIRST_BYTES", 1024)  # so that there is time to kill
    async with serving_ranks(shrinking(4)) as server, asyncio.timeout(60):
        async with Traffic(server, bodies()) as traffic:
            before = processes(server)
            pinned = [[3, 2, 1, 0], [7, 6, 5, 4], [4, 5, 6, 7], [0, 1, 2, 3]]
            pin = {"action": "pin", "model": "tiny", "ranks": pinned}
            moving = asyncio.create_task(server.http.post("/v1/placement", json=pin))
            await until(lambda: server.metric("placement_moves_total", model="tiny") > 0)
            assert (await placement(server))["moving"]
            os.kill(before[0], signal.SIGKILL)
            assert "rank 0: its process ended by SIGKILL" in error_of(await moving, 503)
            await until(lambda: up(server, 4) == [0.0, 1.0, 1.0, 1.0])
            shown = held((await placement(server))["models"]["tiny"])
            assert shown != held({"ranks": [{"experts": experts} for experts in pinned]})
            await traffic.more()
            await until(lambda: up(server, 4) == [1.0] * 4, 30)
            assert {rank: processes(server)[rank] for rank in (1, 2, 3)} == {
                rank: before[rank] for rank in (1, 2, 3)
            }
            assert held((await placement(server))["models"]["tiny"]) == shown
            await traffic.more()
            monkeypatch.undo()
            assert held(await change(server, **pin)) == [sorted(experts) for experts in pinned]
            await traffic.more()
        assert traffic.wrong == []
        assert server.metric("placement_failures_total") == 1


async def test_a_rank_that_fails_alone_starts_again_alone() -> None:
    async with serving_ranks(shrinking(2)) as server, asyncio.timeout(60):
        before = processes(server)
        with pytest.raises(DeviceLostError, match="the step failed on some ranks alone: ValueError: span"):
            await step_with_room_for(3, server)
        await until(lambda: server.metric("rank_starts_total", rank="1") == 2)
        await until(lambda: up(server, 2) == [1.0, 1.0], 30)
        after = processes(server)
        assert after[0] == before[0]
        assert after[1] != before[1]
        assert len(await output_for(server, rows(3))) == 3


async def test_memory_is_shared_with_the_rank_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving_ranks(shrinking(2)) as server, asyncio.timeout(60):
        loaded = server.app.engine.loaded
        assert loaded is not None
        old = await asyncio.to_thread(Arena, 1 << 16, loaded.register)
        with monkeypatch.context() as held_back:
            held_back.setattr(Returning, "look", lambda _: None)
            await lose(server, 0, signal.SIGKILL, 2)
            new = await asyncio.to_thread(Arena, 1 << 16, loaded.register)
            await asyncio.to_thread(old.close)
        await until(lambda: up(server, 2) == [1.0, 1.0], 30)
        block = new.take(4 * HIDDEN * 6)
        assert block is not None
        values = rows(6)
        request = LayerRequest(6, values.tobytes(), "FP32", None, "INT32", None, "FP32", block.span)
        runner = loaded.runners["tiny"]
        await asyncio.to_thread(lambda: runner.begin([request]).finish())
        written = np.frombuffer(bytes(host_view(block.span)), np.float32).reshape(6, HIDDEN)
        assert close(written, await output_for(server, values))
        assert up(server, 2) == [1.0, 1.0]
        await asyncio.to_thread(new.close)


async def test_a_rank_that_ends_while_it_starts_again_is_started_again() -> None:
    async with serving_ranks(shrinking(2)) as server, asyncio.timeout(60):
        async with Traffic(server, bodies()) as traffic:
            survivor = processes(server)[1]
            await lose(server, 0, signal.SIGKILL, 2)
            for number in (signal.SIGKILL, signal.SIGSTOP):
                await until(lambda: len(rank_processes()) == 2)
                started = next(process for process in rank_processes() if process != survivor)
                os.kill(started, number)
                await until(lambda started=started: started not in rank_processes())  # type: ignore[misc]
                assert up(server, 2) == [0.0, 1.0]
            await until(lambda: up(server, 2) == [1.0, 1.0], 30)
            assert processes(server)[1] == survivor
            await traffic.more()
        assert traffic.wrong == []
        assert server.metric("rank_starts_total", rank="0") == 4
