"""What arrives while a step runs is not left until its end: timeouts pass, and cancelled work is dropped."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from expertd.service.channels.channel import ServerChannel
from tests.service.apps import HIDDEN, Serving, hidden_request, output_of, rows
from tests.service.channels.peer import Peer
from tests.service.channels.servers import answer_of, answer_to, channel, channel_server, claimed, mapped
from tests.service.channels.test_remote import Asked, remote, request
from tests.service.runners import DeviceRunner, EchoRunner
from tests.service.waiting import until


async def in_step(runner: EchoRunner) -> None:
    assert await asyncio.to_thread(runner.entered.acquire, True, 60)


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


async def test_timeouts_cancellations_and_ends_of_callers_are_noticed_during_a_step(tmp_path: Path) -> None:
    async with during_a_step(tmp_path) as (server, peer):
        answer = await answer_of(peer, 2, timeout=0.2)
        text = "the request's timeout of 200000 microseconds expired in the queue"
        assert (answer.status, answer.error) == (503, text)
        cancelled = peer.send(2, peer.places(2))
        await until(lambda: server.metric("queue_requests", model="tiny") == 1)
        peer.cancel(cancelled)
        assert (await answer_to(peer, cancelled)).status == 499
        peer.send(2, peer.places(3))
        await until(lambda: server.metric("queue_requests", model="tiny") == 1)
        peer.close()
        await until(lambda: server.metric("queue_requests", model="tiny") == 0)


@asynccontextmanager
async def late_in_its_step(
    directory: Path, num_slots: int = 1
) -> AsyncIterator[tuple[Serving, Peer, EchoRunner]]:
    """A channel whose request 1 was told that its timeout has passed, in a step that still runs."""
    runner = EchoRunner()
    async with channel_server(directory, runner) as server:
        peer = await claimed(server, num_slots=num_slots)
        runner.gate.clear()
        place = peer.places(1)[0]
        peer.array(place, (2, HIDDEN), np.float32)[:] = rows(2)
        late = peer.send(2, peer.places(1), timeout=0.5)
        assert not await asyncio.to_thread(peer.is_in_time, late)
        yield server, peer, runner
        runner.gate.set()


async def late_in_their_steps(directory: Path, count: int, timeout: float) -> list[float]:
    """How late requests were told that their timeouts had passed during their own steps."""
    runner, lateness = EchoRunner(), []
    async with channel(directory, runner) as (server, peer):
        for _ in range(count):
            runner.gate.clear()
            sent = time.perf_counter()
            late = peer.send(2, peer.places(peer.sequence + 1), timeout=timeout)
            assert not await asyncio.to_thread(peer.is_in_time, late)
            lateness.append(time.perf_counter() - sent - timeout)
            assert server.app.engine.executor.unanswered == 1, "the step runs on"
            runner.gate.set()
            assert (await answer_to(peer, late)).status == 200
            await asyncio.sleep(
                1.5 * timeout
            )  # then requests are admitted again, whatever the last step took
        assert server.metric("requests_total", model="tiny", status="503") == count
        assert server.metric("refusals_total", model="tiny", reason="queue_timeout") == count
    assert runner.steps == [[2]] * count
    return lateness


async def test_a_timeout_that_passes_during_the_requests_own_step_is_said_then(tmp_path: Path) -> None:
    await late_in_their_steps(tmp_path, 2, timeout=0.5)


@pytest.mark.timing
async def test_it_is_said_at_once(tmp_path: Path) -> None:
    lateness = await late_in_their_steps(tmp_path, 5, timeout=0.1)
    assert min(lateness) < 5e-3, lateness


async def test_the_slot_of_a_late_request_is_free_when_its_step_has_ended(tmp_path: Path) -> None:
    async with late_in_its_step(tmp_path) as (server, peer, runner):
        assert not peer.answered(1)
        runner.gate.set()
        assert (await answer_to(peer, 1)).status == 200, "of use to nobody"
        peer.array(peer.places(2)[0], (3, HIDDEN), np.float32)[:] = rows(3, 1)
        following = peer.send(3, peer.places(2), timeout=60)
        assert (await answer_to(peer, following)).status == 200
        np.testing.assert_array_equal(peer.array(peer.places(2)[3], (3, HIDDEN), np.float32), rows(3, 1))
        assert not peer.expired(following)
        await until(lambda: server.metric("requests_total", model="tiny", status="200") == 1)
        assert server.metric("requests_total", model="tiny", status="503") == 1, "counted once"
        peer.close()


async def test_other_slots_do_not_wait_for_a_late_request(tmp_path: Path) -> None:
    async with late_in_its_step(tmp_path, num_slots=2) as (server, peer, runner):
        following = peer.send(2, peer.places(2), timeout=60)
        await until(lambda: server.metric("queue_requests", model="tiny") == 1)
        runner.gate.set()
        assert (await answer_to(peer, following)).status == 200
        assert peer.answered(1)
        peer.close()


async def test_a_channel_is_freed_once_the_step_of_a_late_request_has_ended(tmp_path: Path) -> None:
    runner, before = EchoRunner(), mapped()
    async with channel_server(tmp_path, runner) as server:
        peer = await claimed(server)
        runner.gate.clear()
        late = peer.send(2, peer.places(1), timeout=0.5)
        assert not await asyncio.to_thread(peer.is_in_time, late)
        peer.close()
        del peer
        await until(lambda: server.metric("channels") == 0)
        await asyncio.sleep(0.05)
        assert mapped() > before, "the step uses it"
        runner.gate.set()
        await until(lambda: mapped() == before)
        assert server.metric("requests_total", model="tiny", status="503") == 1
        assert server.metric("requests_total", model="tiny", status="200") == 0


async def test_a_cancel_is_not_lost_if_its_request_waits_for_its_slot(tmp_path: Path) -> None:
    """The device has answered the request before it there, whose step has not been seen to end."""
    runner = DeviceRunner()
    async with channel(tmp_path, runner, request={"num_slots": 1}) as (server, peer):
        entry = server.app.channels.entries["1"]
        runner.gate.clear()
        first = peer.send(2, peer.places(1))
        await in_step(runner)
        peer.words[(peer.starts[0] + 128) // 8] = first  # as the device does
        peer.send(3, peer.places(2))
        peer.cancel(2)
        await until(lambda: getattr(entry.channel, "_look_again", False))
        runner.gate.set()
        assert (await answer_to(peer, 2)).status == 499
    assert runner.steps == [[2]]


async def test_a_channel_has_one_timer_and_none_when_it_is_closed(tmp_path: Path) -> None:
    async with during_a_step(tmp_path) as (server, other):
        before = mapped()
        peer = await claimed(server, num_slots=64)
        scheduled = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        expire = ServerChannel.expire

        def timers() -> int:
            return sum(getattr(timer._callback, "__func__", None) is expire for timer in scheduled)

        peer.send(1, peer.places(1), timeout=60)
        for _ in range(5):
            sequence = peer.send(1, peer.places(peer.sequence + 1), timeout=0.02)
            assert (await answer_to(peer, sequence)).status == 503
        await until(lambda: timers() == 1)
        peer.close()
        del peer
        await until(lambda: mapped() == before)
        other.close()


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


async def test_an_http_process_waits_for_the_end_of_a_step_whatever_its_timeout(tmp_path: Path) -> None:
    """It has answered its own caller meanwhile, but its memory is in use until then."""
    runner = EchoRunner()
    async with remote(tmp_path, runner) as (server, engine):
        runner.gate.clear()
        asked = Asked(engine, request(2), timeout=0.5)
        await in_step(runner)
        await asyncio.sleep(0.6)
        assert asked.answers == []
        runner.gate.set()
        assert await asked.output() == rows(2).tobytes()
        assert server.metric("refusals_total", model="tiny", reason="queue_timeout") == 0, "it counts itself"


async def test_outputs_of_requests_with_a_timeout_have_the_same_bits(tmp_path: Path) -> None:
    async with channel(tmp_path, limits={"prefill_chunk_tokens": 4}) as (_, peer):
        for count in (1, 3, 16):
            plain, late = [
                await asyncio.to_thread(peer.infer, rows(count), timeout=timeout) for timeout in (0.0, 60.0)
            ]
            np.testing.assert_array_equal(late, plain)
