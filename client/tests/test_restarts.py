"""Callers of a server that is killed, or drains, and is started again: they see one slow call."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from expertd_client import (
    AsyncExpertClient,
    DeadlineError,
    ExpertClient,
    ExpertError,
    InvalidRequestError,
    ModelMetadata,
    ServerUnreachableError,
)
from expertd_client.channel.making import check_same
from tests.callers import Connect
from tests.expertd import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, RunningServer
from tests.fakes import Peer, answering, echo, fake_server, output, refusal
from tests.rounding import assert_rounded
from tests.waiting import wait_for

RNG = np.random.default_rng(52)
X = RNG.standard_normal((7, HIDDEN), dtype=np.float32)
IDS = np.argsort(RNG.random((7, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
WEIGHTS = RNG.random((7, TOP_K), dtype=np.float32)
ONE = np.ones((1, 3), np.float32)
FOR_LONG: dict[str, Any] = {"retry_seconds": 60.0, "timeout": 60.0}


class Callers:
    """Callers of every kind, each in a thread, until the end; `answers` counts right answers."""

    def __init__(self, url: str, expected: Any) -> None:
        self._url, self._expected = url, expected
        self.answers: dict[str, int] = {}
        self.failures: list[tuple[str, BaseException]] = []
        self._is_over = False
        kinds: dict[str, Callable[[str], None]] = {
            "http": self._client,
            "channel": self._client,
            "submit http": self._submits,
            "submit channel": self._submits,
            "async http": lambda kind: asyncio.run(self._async_client(kind)),
            "async channel": lambda kind: asyncio.run(self._async_client(kind)),
            "Channel": self._channel,
            "AsyncChannel": lambda kind: asyncio.run(self._async_channel(kind)),
        }
        self._threads = [threading.Thread(target=self._guarded, args=item) for item in kinds.items()]
        self.answers.update(dict.fromkeys(kinds, 0))

    def end(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wait_for_more(self, count: int) -> None:
        """Wait until each has `count` more answers, or one has failed."""
        before = dict(self.answers)
        wait_for(
            lambda: bool(self.failures) or all(self.answers[kind] >= before[kind] + count for kind in before),
            "every caller is answered",
        )

    def _guarded(self, kind: str, call: Callable[[str], None]) -> None:
        try:
            call(kind)
        except BaseException as error:
            self.failures.append((kind, error))

    def _check(self, kind: str, output: Any) -> None:
        assert_rounded(output, self._expected)
        self.answers[kind] += 1

    def _client(self, kind: str) -> None:
        with ExpertClient(self._url, transport=kind, **FOR_LONG) as client:  # type: ignore[arg-type]
            while not self._is_over:
                self._check(kind, client.infer(MODEL, X, IDS, WEIGHTS))

    def _submits(self, kind: str) -> None:
        transport: Any = kind.split()[1]
        with ExpertClient(self._url, transport=transport, **FOR_LONG) as client:
            while not self._is_over:
                for pending in [client.submit(MODEL, X, IDS, WEIGHTS) for _ in range(2)]:
                    self._check(kind, pending.wait())

    async def _async_client(self, kind: str) -> None:
        transport: Any = kind.split()[1]

        async def calls(client: AsyncExpertClient) -> None:
            while not self._is_over:
                self._check(kind, await client.infer(MODEL, X, IDS, WEIGHTS))

        async with AsyncExpertClient(self._url, transport=transport, **FOR_LONG) as client:
            await asyncio.gather(*(calls(client) for _ in range(3)))

    def _channel(self, kind: str) -> None:
        with (
            ExpertClient(self._url, **FOR_LONG) as client,
            client.open_channel(MODEL, max_tokens=8, num_slots=2) as channel,
        ):
            for slot in channel.slots:
                self._write(slot)
            first, second = channel.slots
            pending = channel.submit(first, 7, routed=True)
            while not self._is_over:  # always with one in flight
                following = channel.submit(second, 7, routed=True)
                self._check(kind, channel.wait(pending))
                pending, first, second = following, second, first

    async def _async_channel(self, kind: str) -> None:
        async def calls(channel: Any, slot: Any) -> None:
            self._write(slot)
            while not self._is_over:
                self._check(kind, await channel.infer(slot, 7, routed=True))

        async with (
            AsyncExpertClient(self._url, **FOR_LONG) as client,
            await client.open_channel(MODEL, max_tokens=8, num_slots=3) as channel,
        ):
            await asyncio.gather(*(calls(channel, slot) for slot in channel.slots))

    def _write(self, slot: Any) -> None:
        slot.hidden_states[:7], slot.topk_ids[:7], slot.topk_weights[:7] = X, IDS, WEIGHTS


@contextmanager
def calling(server: RunningServer) -> Iterator[Callers]:
    with ExpertClient(server.url, transport="http") as client:
        callers = Callers(server.url, client.infer(MODEL, X, IDS, WEIGHTS))
    callers.start()
    try:
        yield callers
    finally:
        callers.end()


@pytest.mark.slow
def test_callers_of_every_kind_see_one_slow_call(own_server: RunningServer) -> None:
    with calling(own_server) as callers:
        callers.wait_for_more(3)
        for how in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
            own_server.end(how)
            own_server.start_again()
            callers.wait_for_more(3)
    assert callers.failures == []


@pytest.mark.slow
def test_slots_keep_their_memory_and_what_is_in_it(connect: Connect, own_server: RunningServer) -> None:
    client = connect(own_server.url, **FOR_LONG)
    expected = client.infer(MODEL, X)
    with client.open_channel(MODEL, max_tokens=8, num_slots=2) as channel:
        one, other = channel.slots
        one.hidden_states[:7], other.hidden_states[:7] = X, X[::-1]
        arrays, output = one.hidden_states, channel.infer(one, 7)
        places = [slot.hidden_states.ctypes.data for slot in channel.slots]
        with own_server.stopped():
            pending = channel.submit(other, 7)
            own_server.end()
        own_server.start_again()
        assert_rounded(channel.wait(pending), expected[::-1])
        assert [slot.hidden_states.ctypes.data for slot in channel.slots] == places
        assert_rounded(output, expected)  # of the first server
        arrays[:7] = X[::-1]  # by a name from before
        assert_rounded(channel.infer(one, 7), expected[::-1])


@pytest.mark.slow
def test_a_server_that_comes_back_with_other_weights(connect: Connect, own_server: RunningServer) -> None:
    client = connect(own_server.url, **FOR_LONG)
    with client.open_channel(MODEL, max_tokens=8) as channel:
        channel.infer(channel.slots[0], 1)
        own_server.end()
        own_server.start_again("models.0.weights.seed=1")
        with pytest.raises(InvalidRequestError, match=r"^demo: expected the layer as before, .*weights_id="):
            channel.infer(channel.slots[0], 1)


def test_another_format_of_weights_is_another_layer() -> None:
    said = ModelMetadata("m", 4, 2, "FP32", weights_id="w", weight_format="FP8")
    older = replace(said, weight_format=None)
    check_same(said, older)
    check_same(older, said)
    with pytest.raises(InvalidRequestError, match=r"^m: expected the layer as before, .*'FP8'.*'MXFP4'"):
        check_same(said, replace(said, weight_format="MXFP4"))


@pytest.mark.slow
def test_nothing_is_repeated_for_longer_than_allowed(connect: Connect, own_server: RunningServer) -> None:
    """Neither after retry_seconds nor after the deadline; a closed channel is not opened again at all."""
    client = connect(own_server.url, transport="channel", retry_seconds=0.3)
    client.infer(MODEL, X)
    patient = connect(own_server.url, transport="channel", retry_seconds=3600)
    patient.infer(MODEL, X)
    channels = [each.open_channel(MODEL, max_tokens=8) for each in (client, patient)]
    own_server.end()

    def took(call: Callable[[], Any], error: type[ExpertError]) -> float:
        began = time.monotonic()
        with pytest.raises(error):
            call()
        return time.monotonic() - began

    calls: list[Callable[..., Any]] = [
        lambda **options: client.infer(MODEL, X, **options),
        lambda **options: channels[0].infer(channels[0].slots[0], 1, **options),
    ]
    assert all(took(call, ServerUnreachableError) > 0.2 for call in calls)
    calls = [
        lambda **options: patient.infer(MODEL, X, **options),
        lambda **options: channels[1].infer(channels[1].slots[0], 1, **options),
    ]
    for call in calls:
        with pytest.raises((ServerUnreachableError, DeadlineError)):
            call(timeout=0.3)
    for channel in channels:
        channel.close()
        with pytest.raises(ServerUnreachableError):
            channel.infer(channel.slots[0], 1)


def test_a_connection_that_breaks_without_a_whole_answer(connect: Connect) -> None:
    broken: list[bytes] = []

    def handle(peer: Peer) -> None:
        request = peer.request()
        peer.send(broken.pop() if broken else echo(request))
        peer.close()

    with fake_server(handle) as server:
        for seconds, requests in ((20.0, 3), (0.0, 1)):
            broken[:] = [b"", output([1, 3], "FP32", ONE.tobytes())[:-5]]
            client = connect(server.url, retry_seconds=seconds)
            if seconds:
                np.testing.assert_array_equal(client.infer("m", ONE), ONE)
            else:
                with pytest.raises(ServerUnreachableError):
                    client.infer("m", ONE)
            client.close()
            assert len(server.requests) == requests
            server.requests.clear()


@pytest.mark.parametrize(
    ("status", "text", "header", "repeats"),
    [
        (503, "server: expected it ready, got shutting down", "", True),
        (503, "queue: expected room, got none", "Retry-After: 0", True),
        (503, "timeout: expected a longer one, got 1 us", "", False),
        (429, "queue: expected room, got none", "Retry-After: 0", False),
        (500, "step: expected it to work, got an error", "", False),
    ],
)
def test_refusals_that_pass_are_waited_for(
    connect: Connect, status: int, text: str, header: str, repeats: bool
) -> None:
    refusals = 5

    def handle(peer: Peer) -> None:
        nonlocal refusals
        while True:
            request = peer.request()
            refusals -= 1
            peer.send(refusal(status, text, *[header] * bool(header)) if refusals >= 0 else echo(request))

    with fake_server(handle) as server:
        client = connect(server.url, retry_seconds=20, max_retries=1)
        if repeats:
            np.testing.assert_array_equal(client.infer("m", ONE), ONE)
        else:
            with pytest.raises(ExpertError, match=text.partition(":")[0]):
                client.infer("m", ONE)
        client.close()
    assert len(server.requests) == (6 if repeats else 2 if status == 429 else 1)


def test_whether_a_server_is_ready_is_asked_once(connect: Connect) -> None:
    with fake_server(answering(refusal(503, "server: expected it ready, got loading"))) as server:
        client = connect(server.url, retry_seconds=20)
        assert client.ready() is False
        client.close()
    assert len(server.requests) == 1


@pytest.mark.parametrize("seconds", [-1, float("nan"), "1"])
def test_seconds_that_cannot_be(seconds: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^retry_seconds: expected at least 0, got "):
        ExpertClient("http://localhost", retry_seconds=seconds)
