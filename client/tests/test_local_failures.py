"""Calls over channels when servers stop, die or are full, and when callers leave or fork."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertd_client import (
    AsyncExpertClient,
    DeadlineError,
    ExpertClient,
    ServerBusyError,
    ServerUnreachableError,
)
from tests.callers import Connect
from tests.expertd import HIDDEN, MODEL, RunningServer, channels_in, running_server
from tests.programs import run, running
from tests.rounding import assert_rounded
from tests.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process
RNG = np.random.default_rng(12)
X = RNG.standard_normal((5, HIDDEN), dtype=np.float32)


def batch(number: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """Different hidden states, so that an answer to another request is noticed."""
    return X[: 1 + number % 5] * np.float32(1 + number / 35)


def test_many_threads_get_their_own_answers(sharing_server: RunningServer) -> None:
    with ExpertClient(sharing_server.url, transport="http") as client:
        expected = [client.infer(MODEL, batch(number)) for number in range(35)]
    with ExpertClient(sharing_server.url, transport="channel") as client, ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(lambda number: client.infer(MODEL, batch(number % 35)), range(700)))
        wait_for(
            lambda: len(sharing_server.channels()) == 1, "they share one channel, and smaller ones are closed"
        )
    for number, answer in enumerate(answers):
        assert_rounded(answer, expected[number % 35])


async def test_many_tasks_get_their_own_answers(sharing_server: RunningServer) -> None:
    async with AsyncExpertClient(sharing_server.url, transport="http") as client:
        expected = [await client.infer(MODEL, batch(number)) for number in range(35)]
    async with AsyncExpertClient(sharing_server.url, transport="channel") as client:
        answers = await asyncio.gather(*(client.infer(MODEL, batch(number % 35)) for number in range(350)))
    for number, answer in enumerate(answers):
        assert_rounded(answer, expected[number % 35])


@pytest.mark.parametrize("transport", ["channel", "http"])
def test_a_full_queue_is_waited_for(tmp_path: Path, transport: Any) -> None:
    """Callers that together ask for more than the queue holds are all answered, if they may retry."""
    limits = ["limits.max_request_tokens=512", "limits.max_batch_tokens=512", "limits.max_queue_tokens=512"]
    tokens = np.zeros((512, HIDDEN), np.float32)
    refusals: list[ServerBusyError] = []

    def impatient(client: ExpertClient) -> None:
        while not refusals:
            try:
                client.infer(MODEL, tokens)
            except ServerBusyError as busy:
                refusals.append(busy)

    with running_server(tmp_path, *limits, channels_in(tmp_path)) as server, ThreadPoolExecutor(8) as pool:
        with ExpertClient(server.url, transport=transport, max_retries=0) as hasty:
            for done in [pool.submit(impatient, hasty) for _ in range(8)]:
                done.result()
        assert all(busy.retry_after is not None and busy.status == 503 for busy in refusals)
        with ExpertClient(server.url, transport=transport, max_retries=20) as patient:
            for answered in [pool.submit(patient.infer, MODEL, tokens) for _ in range(8)]:
                assert answered.result().shape == tokens.shape


def test_a_deadline_ends_the_call_and_its_place_is_used_again(
    connect: Connect, sharing_server: RunningServer
) -> None:
    client = connect(sharing_server.url, transport="channel", max_connections=1)
    expected = client.infer(MODEL, X)
    for _ in range(2):
        with sharing_server.stopped(), pytest.raises(DeadlineError, match=r"within 0\.1 s"):
            client.infer(MODEL, X * 2, timeout=0.1)
        np.testing.assert_array_equal(client.infer(MODEL, X), expected)


def test_a_deadline_while_other_calls_wait(sharing_server: RunningServer) -> None:
    """The thread that listens for all leaves first; the others get their answers."""
    with ExpertClient(sharing_server.url, transport="channel") as client, ThreadPoolExecutor(6) as pool:
        expected = client.infer(MODEL, X)
        with sharing_server.stopped():
            early = pool.submit(client.infer, MODEL, X, timeout=0.3)
            later = [pool.submit(client.infer, MODEL, X, timeout=20) for _ in range(5)]
            with pytest.raises(DeadlineError):
                early.result()
        for done in later:
            assert_rounded(done.result(), expected)


async def test_a_cancelled_call_leaves_its_place(sharing_server: RunningServer) -> None:
    async with AsyncExpertClient(sharing_server.url, transport="channel", max_connections=1) as client:
        expected = await client.infer(MODEL, X)
        for _ in range(3):
            with sharing_server.stopped():
                call = asyncio.create_task(client.infer(MODEL, X * 2))
                await asyncio.sleep(0.02)  # it is sent, or waits for its place: both must be given up
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            np.testing.assert_array_equal(await client.infer(MODEL, X), expected)


def test_a_killed_server_ends_all_calls_until_it_is_started_again(
    connect: Connect, own_server: RunningServer
) -> None:
    client = connect(own_server.url, transport="channel")
    expected = client.infer(MODEL, X)
    own_server.stop()  # so that the call is in progress
    threading.Timer(0.1, own_server.process.kill).start()
    for _ in range(2):
        with pytest.raises(ServerUnreachableError):
            client.infer(MODEL, X)
    own_server.start_again()
    np.testing.assert_array_equal(client.infer(MODEL, X), expected)
    assert client.client.transport == "channel"


def test_a_killed_server_wakes_every_thread(own_server: RunningServer) -> None:
    with ExpertClient(own_server.url, transport="channel") as client, ThreadPoolExecutor(5) as pool:
        client.infer(MODEL, X)
        own_server.stop()
        calls = [pool.submit(client.infer, MODEL, X) for _ in range(5)]
        threading.Timer(0.1, own_server.process.kill).start()
        for call in calls:
            with pytest.raises(ServerUnreachableError):
                call.result()


FORK = """
import os, sys
import numpy as np
from expertd_client import ExpertClient

client = ExpertClient(sys.argv[1], transport="channel")
values = np.ones((5, 512), np.float32)
expected = client.infer("demo", values)
child = os.fork()
atol = 2**-7 * np.abs(expected).max()
for _ in range(20):  # some in steps with the other process's
    np.testing.assert_allclose(client.infer("demo", values), expected, rtol=0, atol=atol)
if child:
    assert os.waitpid(child, 0)[1] == 0
    np.testing.assert_array_equal(client.infer("demo", values), expected)
client.close()
"""


def test_both_sides_of_a_fork_have_their_own(sharing_server: RunningServer) -> None:
    run(FORK, sharing_server.url)
    wait_for(lambda: not sharing_server.channels(), "no channel stays open")


ORPHAN = """
import os, sys, time
import numpy as np
from expertd_client import ExpertClient

client = ExpertClient(sys.argv[1], transport="channel")
client.infer("demo", np.ones((5, 512), np.float32))
if not os.fork():
    print("child", flush=True)
    time.sleep(60)
os.kill(os.getpid(), 9)
"""


def test_a_forked_child_does_not_keep_a_channel_open(sharing_server: RunningServer) -> None:
    with running(ORPHAN, sharing_server.url) as parent:
        assert parent.says("child")
        wait_for(lambda: not sharing_server.channels(), "the channel of a dead parent is closed")
