"""Channels without copies when servers stop or die, and when callers close or forget them."""

import json
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from expertd_client import (
    DeadlineError,
    ExpertClient,
    ServerUnreachableError,
    TransportUnavailableError,
)
from expertd_client.device_memory import DeviceMemoryError
from tests.callers import Connect, one_client
from tests.expertd import HIDDEN, MODEL, RunningServer, channels_in, running_server
from tests.rounding import assert_rounded
from tests.waiting import wait_for

pytestmark = pytest.mark.slow  # a server process
GONE = r"^channel: expected an answer, got none: the server has closed it$"
CLOSED = r"^channel: expected an open one, got a closed one$"
X = np.random.default_rng(15).standard_normal((8, HIDDEN), dtype=np.float32)


@one_client
def test_places_of_channels_that_are_never_claimed(connect: Connect, tmp_path: Path) -> None:
    with running_server(tmp_path, channels_in(tmp_path), "channels.max_channels=1") as server:
        body = json.dumps({"version": 3, "model": MODEL, "num_slots": 1, "max_tokens": 1}).encode()
        with urllib.request.urlopen(f"{server.url}/v1/channels", body, timeout=60) as response:
            assert response.status == 201  # nobody claims it
        with connect(server.url).open_channel(MODEL, max_tokens=4) as channel:
            channel.wait(channel.submit(channel.slots[0], 1))


def test_a_deadline_and_the_slot_afterwards(connect: Connect, sharing_server: RunningServer) -> None:
    client = connect(sharing_server.url)
    with client.open_channel(MODEL, max_tokens=4) as channel:
        slot = channel.slots[0]
        with sharing_server.stopped():
            ticket = channel.submit(slot, 4, timeout=0.05)
            for _ in range(2):
                with pytest.raises(DeadlineError):
                    channel.wait(ticket)
            for _ in range(2):  # the slot is the late request's still
                with pytest.raises(DeadlineError, match=r"within 0\.02 s"):
                    channel.submit(slot, 4, timeout=0.02)
                assert slot.ticket is ticket
            assert not channel.is_answered(ticket)
        slot.hidden_states[:] = X[:4]
        output = channel.wait(channel.submit(slot, 4))
        np.testing.assert_allclose(output, client.infer(MODEL, X[:4]), rtol=1e-4, atol=1e-5)


def test_a_killed_server(connect: Connect, own_server: RunningServer) -> None:
    with connect(own_server.url).open_channel(MODEL, max_tokens=4) as channel:
        channel.slots[0].hidden_states[:] = 1
        late, *others = channel.slots
        with own_server.stopped():
            with pytest.raises(DeadlineError):
                channel.infer(late, 4, timeout=0.05)
            tickets = [channel.submit(slot, 4) for slot in others]
            own_server.process.kill()
        with pytest.raises(ServerUnreachableError, match=GONE):
            channel.submit(late, 4)
        for ticket in tickets:
            with pytest.raises(ServerUnreachableError, match=GONE):
                channel.wait(ticket)
        assert channel.slots[0].hidden_states.sum() == 4 * HIDDEN  # still ours
        with pytest.raises(ServerUnreachableError, match=GONE):
            channel.submit(others[0], 4)


def test_a_closed_channel(connect: Connect, sharing_server: RunningServer) -> None:
    channel = connect(sharing_server.url).open_channel(MODEL, max_tokens=4)
    slot = channel.slots[0]
    channel.wait(channel.submit(slot, 1))
    with sharing_server.stopped():
        late = channel.submit(slot, 4, timeout=0.05)
        with pytest.raises(DeadlineError):
            channel.wait(late)
        channel.close()
        channel.close()
        for _ in range(2):  # the failed request leaves its slot
            with pytest.raises(ServerUnreachableError, match=CLOSED):
                channel.wait(late)  # an answer that is there would be given, even now
            with pytest.raises(ServerUnreachableError, match=CLOSED):
                channel.submit(slot, 1)
    slot.hidden_states[:] = 0  # memory that is still mapped
    wait_for(lambda: not sharing_server.channels(), "the server has closed it")


def test_a_channel_that_is_dropped_is_closed(connect: Connect, sharing_server: RunningServer) -> None:
    connect(sharing_server.url).open_channel(MODEL, max_tokens=4)
    wait_for(lambda: not sharing_server.channels(), "the server has closed it")


def test_memory_that_the_driver_does_not_share(
    connect: Connect, sharing_server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: int) -> None:
        raise DeviceMemoryError("cuIpcGetMemHandle: expected CUDA_SUCCESS, got status 801")

    monkeypatch.setattr("expertd_client.channel.making._gpu", lambda device: 0)
    monkeypatch.setattr("expertd_client.channel.opening.GpuAllocation", refused)
    with pytest.raises(TransportUnavailableError, match=r"^cuIpcGetMemHandle: .* status 801$") as caught:
        connect(sharing_server.url).open_channel(MODEL, max_tokens=1, device="cuda:0")
    assert caught.type is TransportUnavailableError


def test_channels_of_several_threads(sharing_server: RunningServer) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with client.open_channel(MODEL, max_tokens=8, num_slots=1) as channel:
                for _ in range(50):
                    channel.slots[0].hidden_states[:] = X
                    output = channel.wait(channel.submit(channel.slots[0], 8))
                    assert_rounded(output, expected)
        except BaseException as error:
            failures.append(error)

    with ExpertClient(sharing_server.url) as client:
        expected = client.infer(MODEL, X)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
