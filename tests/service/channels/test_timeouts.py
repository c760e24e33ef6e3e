"""What arrives while a step runs is not left until its end: timeouts pass, and cancelled work is dropped."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from expertd.service.engine.batching import Scheduler
from expertd.service.engine.loading import load
from expertd.service.ranks.loading import load_ranks
from tests.service.apps import HIDDEN, Serving, hidden_request, output_of, rows, serving, tiny_settings
from tests.service.channels.peer import Peer
from tests.service.channels.servers import answer_of, answer_to, channel_server, claimed, mapped
from tests.service.channels.test_remote import Asked, remote, request
from tests.service.runners import EchoRunner
from tests.service.waiting import until


async def in_step(runner: EchoRunner) -> None:
    assert await asyncio.to_thread(runner.entered.acquire, True, 10)


@asynccontextmanager
async def during_a_step(directory: Path) -> AsyncIterator[tuple[Serving, Peer]]:
    """A server in a step of another request, the only one, and a channel, which the test closes."""
    runner = EchoRunner()
    async with channel_server(directory, runner) as server:
        peer = await claimed(server)
        runner.gate.clear()
        blocker = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
        await in_step(runner)
        yield server, peer
        runner.gate.set()
        output_of(await blocker)
    assert runner.steps == [[1]]


async def test_a_timeout_passes_during_the_step_in_which_the_request_arrived(tmp_path: Path) -> None:
    async with during_a_step(tmp_path) as (_, peer):
        answer = await answer_of(peer, 2, timeout=0.02)
        text = "the request's timeout of 20000 microseconds expired in the queue"
        assert (answer.status, answer.error) == (503, text)
        peer.close()


@pytest.mark.parametrize("num_slots", [1, 4])
async def test_a_timeout_passes_during_the_requests_own_step(tmp_path: Path, num_slots: int) -> None:
    """The step's output appears nowhere in the region, also if the slot is used again before it ends."""
    runner = EchoRunner()
    async with channel_server(tmp_path, runner) as server:
        peer = await claimed(server, num_slots=num_slots)
        runner.gate.clear()
        late_place, place = peer.places(1), peer.places(2)
        peer.array(late_place[0], (2, HIDDEN), np.float32)[:] = rows(2)
        late = peer.send(2, late_place, timeout=0.02)
        await in_step(runner)
        answer = await answer_to(peer, late)
        text = "the request's timeout of 20000 microseconds expired in its step"
        assert (answer.status, answer.error) == (503, text)
        assert server.app.engine.scheduler.unanswered == 1, "the step runs on"
        peer.array(late_place[3], (2, HIDDEN), np.float32)[:] = 7
        peer.array(place[0], (3, HIDDEN), np.float32)[:] = rows(3, 1)
        following = peer.send(3, place, timeout=30)
        await until(lambda: server.metric("queue_requests", model="tiny") == 1)
        runner.gate.set()
        assert (await answer_to(peer, following)).status == 200
        np.testing.assert_array_equal(peer.array(place[3], (3, HIDDEN), np.float32), rows(3, 1))
        if num_slots > 1:
            assert (peer.array(late_place[3], (2, HIDDEN), np.float32) == 7).all()
        await until(lambda: server.metric("requests_total", model="tiny", status="200") == 1)
        assert server.metric("requests_total", model="tiny", status="503") == 1
        peer.close()


async def test_a_channel_is_freed_once_the_step_that_was_left_has_ended(tmp_path: Path) -> None:
    runner, before = EchoRunner(), mapped()
    async with channel_server(tmp_path, runner) as server:
        peer = await claimed(server)
        runner.gate.clear()
        late = peer.send(2, peer.places(1), timeout=0.02)
        await in_step(runner)
        assert (await answer_to(peer, late)).status == 503
        peer.close()
        del peer
        await until(lambda: server.metric("channels") == 0)
        await asyncio.sleep(0.05)
        assert mapped() > before, "the step uses it"
        runner.gate.set()
        await until(lambda: mapped() == before)


async def test_what_is_cancelled_during_a_step_is_not_computed(tmp_path: Path) -> None:
    async with during_a_step(tmp_path) as (server, peer):
        sequence = peer.send(2, peer.places(1))
        await until(lambda: server.metric("queue_requests", model="tiny") == 1)
        peer.cancel(sequence)
        assert (await answer_to(peer, sequence)).status == 499
        peer.close()


async def test_what_a_caller_leaves_behind_during_a_step_is_not_computed(tmp_path: Path) -> None:
    async with during_a_step(tmp_path) as (server, peer):
        peer.send(2, peer.places(1))
        await until(lambda: server.metric("queue_requests", model="tiny") == 1)
        peer.close()
        await until(lambda: server.metric("queue_requests", model="tiny") == 0)


async def test_what_an_http_process_cancels_during_a_step_is_answered_then(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with remote(tmp_path, runner) as (server, engine):
        runner.gate.clear()
        begun = Asked(engine, request(1))
        await in_step(runner)
        queued = Asked(engine, request(2))
        await until(lambda: server.metric("queue_requests", model="tiny") == 1)
        error = ValueError("late")
        engine.cancel(queued.pending, error)
        assert await queued.answer() is error
        runner.gate.set()
        assert await begun.output() == rows(1).tobytes()


async def test_short_steps_are_not_looked_into(tmp_path: Path) -> None:
    runner = EchoRunner()
    async with channel_server(tmp_path, runner) as server:
        peer = await claimed(server)
        assert (await answer_of(peer)).status == 200
        scheduler = server.app.engine.scheduler
        assert isinstance(scheduler, Scheduler)
        lookout = scheduler._lookout
        await until(lambda: lookout.looks == 0)  # the first step of a size may be long
        assert (await answer_of(peer)).status == 200
        assert lookout.looks == 0
        peer.close()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_outputs_of_requests_with_a_timeout_have_the_same_bits(tmp_path: Path, ranks: int) -> None:
    async with serving(
        tiny_settings(
            {"prefill_chunk_tokens": 4}, channels={"socket": str(tmp_path / "channels")}, ranks=ranks
        ),
        load if ranks == 1 else load_ranks,
    ) as server:
        peer = await claimed(server)
        for count in (1, 3, 16):
            plain, late = [
                await asyncio.to_thread(peer.infer, rows(count), timeout=timeout) for timeout in (0.0, 60.0)
            ]
            np.testing.assert_array_equal(late, plain)
        peer.close()
