"""Requests that a stream makes by itself, with a thread for a stream: their order, failures and restarts."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from expertd_client import (
    Channel,
    DeadlineError,
    ExpertClient,
    ExpertError,
    InvalidRequestError,
    ServerUnreachableError,
)
from expertd_client.channel import enqueueing
from tests.expertd import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, RunningServer
from tests.rounding import assert_rounded
from tests.streams import ThreadStream
from tests.waiting import wait_for

RNG = np.random.default_rng()
ROWS = 3
Array = npt.NDArray[Any]


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadStream]:
    """What channels enqueue on, whatever memory they have."""
    made = ThreadStream()
    monkeypatch.setattr("expertd_client.channel.channel.stream_of", lambda memory: made)
    monkeypatch.setattr(enqueueing, "_LOOK_SECONDS", 0.05)
    yield made
    made.end()


class Caller:
    """Enqueues calls with random rows and routing, which take slots in turn, on a stream."""

    def __init__(self, client: ExpertClient, channel: Channel, stream: ThreadStream) -> None:
        self.client, self.channel, self.stream = client, channel, stream
        self.inputs: list[tuple[Array, Array, Array]] = []
        self.outputs: dict[int, Array] = {}

    def call(self, count: int = 1, first_id: int | None = None) -> None:
        for _ in range(count):
            number = len(self.inputs)
            x = RNG.standard_normal((ROWS, HIDDEN), dtype=np.float32)
            ids = np.argsort(RNG.random((ROWS, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
            weights = RNG.random((ROWS, TOP_K), dtype=np.float32)
            if first_id is not None:
                ids[0, 0] = first_id
            self.inputs.append((x, ids, weights))
            slot = self.channel.slots[number % len(self.channel.slots)]
            self.stream.then(partial(self._write, slot, number))
            request = self.channel.enqueue(slot, ROWS, routed=True)
            self.stream.then(partial(self._read, self.channel.enqueue_wait(request), number))

    def _read(self, output: Array, number: int) -> None:
        self.outputs[number] = output.copy()

    def _write(self, slot: Any, number: int) -> None:
        slot.hidden_states[:ROWS], slot.topk_ids[:ROWS], slot.topk_weights[:ROWS] = self.inputs[number]

    def check(self) -> None:
        """All outputs so far, against one call over HTTP."""
        self.stream.synchronize()
        assert sorted(self.outputs) == list(range(len(self.inputs)))
        together = [np.concatenate(parts) for parts in zip(*self.inputs, strict=True)]
        output = np.concatenate([self.outputs[number] for number in range(len(self.inputs))])
        assert_rounded(output, self.client.infer(MODEL, *together))

    def are_nan(self, begin: int, end: int) -> bool:
        self.stream.synchronize()
        return all(np.isnan(self.outputs[number]).all() for number in range(begin, end))


def opened(client: ExpertClient, stream: ThreadStream, num_slots: int = 2) -> Caller:
    return Caller(client, client.open_channel(MODEL, max_tokens=ROWS, num_slots=num_slots), stream)


def test_many_are_enqueued_ahead_of_the_stream(sharing_server: RunningServer, stream: ThreadStream) -> None:
    with ExpertClient(sharing_server.url, transport="http") as client:
        caller = opened(client, stream, num_slots=16)
        caller.channel.slots = caller.channel.slots[:2]  # 64 requests in the memory of two
        gate = threading.Event()
        for _ in range(3):
            stream.synchronize()
            gate.clear()
            stream.then(gate.wait)
            caller.call(64)
            assert len(caller.outputs) == len(caller.inputs) - 64
            gate.set()
        caller.check()
        times = caller.channel.enqueue(caller.channel.slots[0], 0).times
        wait_for(lambda: times() is not None, "an answer has times")
        caller.channel.close()


def test_a_caller_waits_while_the_server_has_no_room(
    sharing_server: RunningServer, stream: ThreadStream
) -> None:
    with ExpertClient(sharing_server.url, transport="http") as client:
        caller = opened(client, stream)
        gate = threading.Event()
        stream.then(gate.wait)
        caller.call(8)
        further = threading.Thread(target=caller.call, args=(12,))
        further.start()
        further.join(0.05)
        assert further.is_alive()
        assert not caller.outputs
        gate.set()
        further.join()
        caller.check()
        caller.channel.close()


def test_what_cannot_be_enqueued(sharing_server: RunningServer, stream: ThreadStream) -> None:
    with ExpertClient(sharing_server.url, transport="http") as client:
        channel, other = (client.open_channel(MODEL, max_tokens=ROWS, num_slots=2) for _ in range(2))
        pending = channel.submit(channel.slots[0], 0)
        calls: list[tuple[str, Callable[[], object]]] = [
            ("channel: expected no request of submit", lambda: channel.enqueue(channel.slots[1], 1)),
            ("slot: expected one of this channel", lambda: other.enqueue(channel.slots[0], 1)),
            ("num_tokens: expected 0 to 3, got 4", lambda: other.enqueue(other.slots[0], 4)),
            ("model: expected demo, got 'm'", lambda: other.enqueue(other.slots[0], 1, model="m")),
            ("slot 1: expected a free one", lambda: other.enqueue(other.slots[1], 1)),
            ("channel: expected requests by enqueue", lambda: other.submit(other.slots[0], 1)),
            ("request: expected one that was not", lambda: channel.enqueue_wait(request)),
        ]
        request = other.enqueue(other.slots[1], 1)
        for text, call in calls:
            with pytest.raises(InvalidRequestError, match=f"^{text}"):
                call()
        other.enqueue_wait(request)
        channel.wait(pending)
        for each in (channel, other):
            each.close()
        with pytest.raises(
            ServerUnreachableError, match=r"^channel: expected an open one, got a closed one$"
        ):
            other.enqueue(other.slots[0], 1)


def test_memory_of_the_host_has_no_stream(sharing_server: RunningServer) -> None:
    with (
        ExpertClient(sharing_server.url, transport="http") as client,
        client.open_channel(MODEL, max_tokens=1) as channel,
        pytest.raises(InvalidRequestError, match=r"^device: expected a GPU for enqueue, got the host$"),
    ):
        channel.enqueue(channel.slots[0], 1)


def test_a_refused_request_gives_nan_to_all_later_ones(
    sharing_server: RunningServer, stream: ThreadStream
) -> None:
    with ExpertClient(sharing_server.url, transport="http", retry_seconds=20) as client:
        caller = opened(client, stream)
        failures: list[tuple[int, ExpertError]] = []
        caller.channel.on_failure = lambda error: failures.append((len(caller.outputs), error))
        gate = threading.Event()
        stream.then(gate.wait)
        caller.call(3)
        caller.call(first_id=NUM_EXPERTS + 1)
        caller.call(3)
        gate.set()
        assert caller.are_nan(3, 7)
        ((number, error),) = failures
        assert (number, type(error)) == (3, InvalidRequestError)  # before the stream had the output
        for _ in range(2):
            with pytest.raises(InvalidRequestError) as raised:
                caller.call()
            assert raised.value is error
        stream.synchronize()
        caller.inputs, caller.outputs = caller.inputs[:3], {n: caller.outputs[n] for n in range(3)}
        caller.check()
        caller.channel.close()


def test_a_server_that_hangs(
    sharing_server: RunningServer, stream: ThreadStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request has a time limit, and so has closing a channel with requests outstanding."""
    monkeypatch.setattr(enqueueing, "_CLOSE_SECONDS", 0.1)
    with ExpertClient(sharing_server.url, transport="http", timeout=3600) as client:
        hurried = client.open_channel(MODEL, max_tokens=ROWS, num_slots=2, timeout=0.3)
        patient = opened(client, stream)
        with sharing_server.stopped():
            caller = Caller(client, hurried, stream)
            caller.call(2)
            assert caller.are_nan(0, 2)
            with pytest.raises(DeadlineError, match=r"within 0\.3 s"):
                caller.call()
            patient.call(4)
            patient.channel.close()
            hurried.close()
            assert patient.are_nan(0, 4)


def test_a_channel_that_is_closed_still_gets_its_answers(
    sharing_server: RunningServer, stream: ThreadStream
) -> None:
    with ExpertClient(sharing_server.url, transport="http") as client:
        for end in (Channel.close, lambda channel: enqueueing._close_all()):
            caller = opened(client, stream)
            stream.then(lambda: time.sleep(0.05))
            caller.call(5)
            end(caller.channel)
            caller.check()


@pytest.mark.slow
def test_a_server_is_restarted_under_a_stream(own_server: RunningServer, stream: ThreadStream) -> None:
    """While requests are outstanding, and while there are none; the server closes channels, too."""
    with ExpertClient(own_server.url, transport="http", retry_seconds=60) as client:
        caller = opened(client, stream)
        caller.call(3)
        caller.check()
        for how in (signal.SIGKILL, signal.SIGTERM):
            gate = threading.Event()
            stream.then(gate.wait)
            caller.call(4)
            own_server.end(how)
            gate.set()
            caller.call(3)
            own_server.start_again()
            caller.call(3)
            caller.check()
        with own_server.stopped():
            caller.call(5)
            own_server.end()
        own_server.start_again()
        caller.check()
        own_server.end()
        own_server.start_again()
        caller.call(3)
        caller.check()
        own_server.close_channels()
        caller.call(20)
        caller.check()
        own_server.end()
        own_server.start_again("models.0.weights.seed=1")
        before = len(caller.inputs)
        caller.call(2)
        assert caller.are_nan(before, before + 2)
        with pytest.raises(InvalidRequestError, match=r"^demo: expected the layer as before"):
            caller.call()
        caller.channel.close()


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_a_server_that_does_not_come_back(
    own_server: RunningServer, stream: ThreadStream, seconds: float
) -> None:
    with ExpertClient(own_server.url, transport="http", retry_seconds=seconds) as client:
        caller = opened(client, stream)
        caller.call(2)
        caller.check()
        with own_server.stopped():
            caller.call(5)
            own_server.end()
        assert caller.are_nan(2, 7)
        with pytest.raises(ServerUnreachableError):
            caller.call()
        caller.channel.close()
