"""Requests that a GPU's stream makes and waits for by itself, on the server's GPU and on another one."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from expertd_client import Channel, ExpertClient, InvalidRequestError, ServerUnreachableError
from expertd_client.channel import enqueueing
from tests.expertd import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, RunningServer
from tests.waiting import wait_for

pytestmark = pytest.mark.gpu
MAX_TOKENS = 64


@pytest.fixture(params=[0, 1])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The server's GPU, and its neighbour if there is one."""
    return torch.device("cuda", request.param if torch.cuda.device_count() > request.param else 0)


@pytest.fixture
def client(sharing_server: RunningServer) -> Iterator[ExpertClient]:
    with ExpertClient(sharing_server.url, transport="http", retry_seconds=60) as made:
        yield made


class Caller:
    """Calls with random tensors through two slots in turn, enqueued on the current stream."""

    def __init__(self, client: ExpertClient, device: torch.device, num_slots: int = 2) -> None:
        self.client, self.device = client, device
        self.channel: Channel = client.open_channel(
            MODEL, max_tokens=MAX_TOKENS, num_slots=num_slots, device=device
        )
        self.calls: list[tuple[torch.Tensor, ...]] = []

    def call(self, tokens: int) -> None:
        """Nothing here waits for the GPU: it makes the tensors itself."""
        x = torch.randn(tokens, HIDDEN, device=self.device)
        ids = torch.rand(tokens, NUM_EXPERTS, device=self.device).topk(TOP_K).indices.int()
        weights = torch.rand(tokens, TOP_K, device=self.device)
        slot = self.channel.slots[len(self.calls) % len(self.channel.slots)]
        for target, source in zip(slot.first(tokens), (x, ids, weights), strict=False):
            target.copy_(source)
        request = self.channel.enqueue(slot, tokens, routed=True)
        self.calls.append((x, ids, weights, self.channel.enqueue_wait(request).clone()))

    def check(self) -> None:
        torch.cuda.synchronize(self.device)
        *inputs, output = [torch.cat(parts) for parts in zip(*self.calls, strict=True)]
        expected = torch.cat([self.client.infer(MODEL, *call[:3]) for call in self.calls])
        assert len(inputs[0]) == len(output)
        torch.testing.assert_close(output, expected, rtol=0, atol=2**-7 * float(expected.abs().max()))


def delayed(device: torch.device) -> None:
    """Keep the current stream busy for tens of milliseconds."""
    with torch.cuda.device(device):
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]


def test_many_are_enqueued_ahead_of_the_gpu(client: ExpertClient, device: torch.device) -> None:
    caller = Caller(client, device)
    for turn in range(4):
        delayed(device)
        for number in range(64):
            caller.call((1, 16, MAX_TOKENS, 7, 0)[number % 5])
        if turn:  # the first call of each size loads code
            assert not torch.cuda.current_stream(device).query()
    caller.check()
    request = caller.channel.enqueue(caller.channel.slots[0], 1)
    caller.channel.enqueue_wait(request)
    wait_for(lambda: request.times() is not None, "an answer has times")
    caller.channel.close()


def test_the_host_waits_once_it_is_too_far_ahead(client: ExpertClient, device: torch.device) -> None:
    caller = Caller(client, device)
    delayed(device)
    for _ in range(700):
        caller.call(2)
    caller.check()
    caller.channel.close()


def test_streams_other_than_the_default(client: ExpertClient, device: torch.device) -> None:
    """Also where torch's current GPU is another one than the channel's."""
    caller = Caller(client, device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(20):
            caller.call(5)
    torch.cuda.current_stream(device).wait_stream(stream)
    with torch.cuda.device(0):
        for _ in range(20):
            caller.call(5)
    caller.check()
    caller.channel.close()


def test_graphs_hold_no_requests(client: ExpertClient) -> None:
    caller = Caller(client, torch.device("cuda", 0))
    caller.call(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device="cuda")  # torch warns of a graph without anything
        with pytest.raises(InvalidRequestError, match="captures no CUDA graph"):
            caller.channel.enqueue(caller.channel.slots[0], 1)
    caller.call(1)
    caller.check()
    caller.channel.close()


def test_a_server_is_restarted_under_a_stream(own_server: RunningServer, device: torch.device) -> None:
    with ExpertClient(own_server.url, transport="http", retry_seconds=120, timeout=120) as client:
        caller = Caller(client, device)
        for _ in range(10):
            caller.call(3)
        for _ in range(2):
            own_server.stop()
            for _ in range(30):
                caller.call(3)
            own_server.end()
            own_server.start_again()
            for _ in range(30):
                caller.call(3)
            caller.check()
        caller.channel.close()


def test_a_server_that_does_not_come_back(own_server: RunningServer, device: torch.device) -> None:
    with ExpertClient(own_server.url, transport="http", retry_seconds=0.5) as client:
        caller = Caller(client, device)
        failures: list[Any] = []
        caller.channel.on_failure = failures.append
        caller.call(3)
        caller.check()
        own_server.stop()
        for _ in range(9):
            caller.call(3)
        own_server.end()
        torch.cuda.synchronize(device)
        assert all(output.isnan().all() for *_, output in caller.calls[1:])
        (error,) = failures
        with pytest.raises(ServerUnreachableError) as raised:
            caller.call(3)
        assert raised.value is error
        caller.channel.close()


def test_a_channel_is_closed_with_requests_outstanding(
    client: ExpertClient, sharing_server: RunningServer, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(client, device)
    for _ in range(9):
        caller.call(3)
    caller.channel.close()
    caller.check()
    monkeypatch.setattr(enqueueing, "_CLOSE_SECONDS", 0.2)
    caller = Caller(client, device)
    caller.call(3)
    torch.cuda.synchronize(device)
    with sharing_server.stopped():
        for _ in range(9):
            caller.call(3)
        caller.channel.close()
        torch.cuda.synchronize(device)
        assert all(output.isnan().all() for *_, output in caller.calls[1:])


PROGRAM = """
import sys, torch
from expertd_client import ExpertClient
client = ExpertClient(sys.argv[1], transport="http")
channel = client.open_channel("demo", max_tokens=4, num_slots=2, device="cuda:0")
channel.enqueue_wait(channel.enqueue(channel.slots[0], 4))
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()
for slot in channel.slots:
    channel.enqueue_wait(channel.enqueue(slot, 4))
"""


def test_a_process_ends_with_requests_outstanding(sharing_server: RunningServer) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, sharing_server.url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        with sharing_server.stopped():
            began = time.monotonic()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.wait(60) == 0
            assert time.monotonic() - began < 30
