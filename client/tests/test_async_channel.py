"""What only channels of event loops do: many tasks wait at once, and the loop goes on."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest

from expertd_client import (
    AsyncChannel,
    AsyncExpertClient,
    DeadlineError,
    InvalidRequestError,
    ServerUnreachableError,
    Slot,
)
from tests.expertd import HIDDEN, MODEL, RunningServer
from tests.rounding import assert_rounded
from tests.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process
GONE = r"^channel: expected an answer, got none: the server has closed it$"
CLOSED = r"^channel: expected an open one, got a closed one$"
X = np.random.default_rng(16).standard_normal((24, HIDDEN), dtype=np.float32)


@asynccontextmanager
async def opened(server: RunningServer, num_slots: int = 2) -> AsyncIterator[AsyncChannel]:
    async with (
        AsyncExpertClient(server.url, transport="http") as client,
        await client.open_channel(MODEL, max_tokens=8, num_slots=num_slots) as channel,
    ):
        yield channel


async def stop_of(server: RunningServer, channel: AsyncChannel) -> "asyncio.Task[object]":
    """A task that waits for an answer of a server that has just been stopped."""
    server.stop()
    task = asyncio.create_task(channel.infer(channel.slots[0], 8))
    while channel.slots[0].ticket is None or not channel._waiters.tasks._waiting:
        await asyncio.sleep(0)
    return task


async def test_tasks_with_a_slot_each(sharing_server: RunningServer) -> None:
    async with AsyncExpertClient(sharing_server.url, transport="http") as client:
        expected = [await client.infer(MODEL, X[start : start + 8]) for start in (0, 8, 16)]

    async def work(channel: AsyncChannel, slot: Slot) -> None:
        for turn in range(40):
            number = (slot.index + turn) % 3
            slot.hidden_states[:] = X[8 * number : 8 * number + 8]
            output = await channel.infer(slot, 8)
            assert_rounded(output, expected[number])

    async with opened(sharing_server, num_slots=6) as channel:
        await asyncio.gather(*(work(channel, slot) for slot in channel.slots))


async def test_a_cancelled_wait_leaves_the_slot_until_the_server_is_done(
    sharing_server: RunningServer,
) -> None:
    async with opened(sharing_server) as channel:
        slot = channel.slots[0]
        with sharing_server.stopped():
            task = await stop_of(sharing_server, channel)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            following = asyncio.create_task(channel.infer(slot, 8))
            await asyncio.sleep(0.02)
            assert not following.done()
            with pytest.raises(InvalidRequestError, match=r"^slot 0: expected a free one, got one in use"):
                await channel.submit(slot, 8)
        assert (await asyncio.wait_for(following, 60)).shape == (8, HIDDEN)
        assert (await channel.infer(slot, 8)).shape == (8, HIDDEN)


async def test_two_tasks_that_wait_for_one_ticket(sharing_server: RunningServer) -> None:
    """One of them gets the output, the other one an error."""
    async with opened(sharing_server) as channel:
        with sharing_server.stopped():
            ticket = await channel.submit(channel.slots[0], 8)
            tasks = [asyncio.create_task(channel.wait(ticket)) for _ in range(2)]
            await asyncio.sleep(0)
        assert (await asyncio.wait_for(tasks[0], 60)).shape == (8, HIDDEN)
        with pytest.raises(InvalidRequestError, match=r"^ticket: expected one that was not waited for, got"):
            await asyncio.wait_for(tasks[1], 60)


async def test_a_task_learns_that_another_one_has_taken_its_answer(sharing_server: RunningServer) -> None:
    """The server may answer a later request in the same place before the event loop looks."""
    async with opened(sharing_server) as channel:
        with sharing_server.stopped():
            first = await channel.submit(channel.slots[0], 8)
            task = asyncio.create_task(channel.wait(first))
            await asyncio.sleep(0)
        wait_for(lambda: channel.is_answered(first), "the server answers")
        for _ in range(channel._link.num_slots):  # the last one takes the first one's answer, and its place
            ticket = await channel.submit(channel.slots[1], 8)
            wait_for(partial(channel.is_answered, ticket), "the server answers")
            await channel.wait(ticket)
        assert not task.done(), "the event loop has not run since"
        assert (await asyncio.wait_for(task, 60)).shape == (8, HIDDEN)


async def test_a_late_task_does_not_end_the_others_wait(sharing_server: RunningServer) -> None:
    async with opened(sharing_server) as channel:
        with sharing_server.stopped():
            early = asyncio.create_task(channel.infer(channel.slots[0], 8, timeout=0.05))
            later = asyncio.create_task(channel.infer(channel.slots[1], 8))
            with pytest.raises(DeadlineError, match=r"within 0\.05 s"):
                await early
        assert (await asyncio.wait_for(later, 60)).shape == (8, HIDDEN)


async def test_closing_ends_the_tasks_that_wait(sharing_server: RunningServer) -> None:
    async with opened(sharing_server) as channel:
        with sharing_server.stopped():
            task = await stop_of(sharing_server, channel)
            await channel.close()
            with pytest.raises(ServerUnreachableError, match=CLOSED):
                await asyncio.wait_for(task, 60)


async def test_a_killed_server_ends_the_tasks_that_wait(own_server: RunningServer) -> None:
    async with opened(own_server) as channel:
        task = await stop_of(own_server, channel)
        own_server.process.kill()
        with pytest.raises(ServerUnreachableError, match=GONE):
            await asyncio.wait_for(task, 60)


def test_a_channel_may_be_left_open_when_its_event_loop_ends(sharing_server: RunningServer) -> None:
    left: list[AsyncChannel] = []

    async def leave() -> None:
        async with AsyncExpertClient(sharing_server.url, transport="http") as client:
            left.append(await client.open_channel(MODEL, max_tokens=8))

    asyncio.run(leave())
    wait_for(
        lambda: len(sharing_server.channels()) == 1,
        "this one is still open, and those of other tests are closed",
    )
    left.clear()
    wait_for(lambda: not sharing_server.channels(), "the server has closed it")
