"""Channels of device calls: the caller's GPU makes calls by itself, also from CUDA graphs, and a server in
another process answers."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from expertd_client import ExpertClient, InvalidRequestError, ServerUnreachableError
from expertd_client.channel.device_channel import DeviceChannel
from tests.paths import ROOT
from tests.service.channels.call_server import (
    CALLER,
    LAYERS,
    NAMES,
    H,
    Server,
    endless_caller,
    expected,
    inputs,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server
        server.close()


@pytest.fixture
def client(server: Server) -> Iterator[ExpertClient]:
    with ExpertClient(server.url, timeout=30) as client, torch.cuda.device(CALLER):
        yield client


@pytest.fixture
def channel(client: ExpertClient) -> Iterator[DeviceChannel]:
    with client.open_device_channel(NAMES, device=str(CALLER)) as channel:
        yield channel


def test_metadata_say_which_gpu_answers(client: ExpertClient) -> None:
    layer = client.metadata(NAMES[0])
    assert layer.device_calls == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert layer.device_calls_own_gpu in ("mps", "turns")


def poisoned(count: int) -> Tensor:
    return torch.full((count, H), torch.nan, dtype=torch.bfloat16, device=CALLER)


@pytest.mark.parametrize("count", [1, 3, 64, 100, 512])
def test_calls_have_the_bits_of_requests(client: ExpertClient, channel: DeviceChannel, count: int) -> None:
    """Of every layer, with requests of other ways between them."""
    for _ in range(3):
        for name in NAMES:
            given, out = inputs(count), poisoned(count)
            assert channel.call(*given, out, model=name) is out
            assert torch.equal(out, expected(client, name, given))
    channel.check()


def test_a_graph_makes_calls(client: ExpertClient, channel: DeviceChannel) -> None:
    """To all layers in a row, in two slots; replayed with other inputs."""
    given, outs = inputs(7), [poisoned(7) for _ in NAMES]
    torch.cuda.synchronize(CALLER)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index, (name, out) in enumerate(zip(NAMES, outs, strict=True)):
            channel.send(*given, model=name, slot=index % 2)
            channel.wait(out, slot=index % 2)
    for _ in range(20):
        for target, source in zip(given, inputs(7), strict=True):
            target.copy_(source)
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        for name, out in zip(NAMES, outs, strict=True):
            assert torch.equal(out, expected(client, name, given))
    channel.check()


# A server with two lanes, or with ranks, launches the steps of calls by its host.
BY_HOST = ["lanes: {decode_max_tokens: 600, decode_batch_tokens: 600}\n", "devices: 0-1\n"]


@pytest.mark.parametrize("settings", BY_HOST)
def test_a_host_launches_calls_of_a_graph(tmp_path: Path, settings: str) -> None:
    """In two slots, to all layers; replayed with other inputs, also after a pause, and by another server."""
    if settings.startswith("devices") and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with (
        Server(tmp_path, settings=settings) as first,
        torch.cuda.device(CALLER),
        ExpertClient(first.url, timeout=90, retry_seconds=60) as client,
        client.open_device_channel(NAMES, device=str(CALLER)) as channel,
    ):
        assert client.metadata(NAMES[0]).device_calls is None
        given, outs = inputs(7), [poisoned(7) for _ in NAMES]
        torch.cuda.synchronize(CALLER)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index, (name, out) in enumerate(zip(NAMES, outs, strict=True)):
                channel.send(*given, model=name, slot=index % 2)
                channel.wait(out, slot=index % 2)

        def replay() -> None:
            for target, source in zip(given, inputs(7), strict=True):
                target.copy_(source)
            for out in outs:
                out.fill_(torch.nan)
            graph.replay()

        def check() -> None:
            torch.cuda.synchronize(CALLER)
            channel.check()
            for name, out in zip(NAMES, outs, strict=True):
                assert torch.equal(out, expected(client, name, given))

        for turn in range(10):
            replay()
            check()
            if turn == 5:
                time.sleep(11)  # by then, the server looks less often
        first.kill()
        replay()
        with Server(tmp_path, first.port, settings) as second:
            check()
            replay()
            check()
            second.close()


@pytest.mark.parametrize("count", [1, 64, 512])
def test_calls_that_a_host_launches_have_the_bits_of_requests(tmp_path: Path, count: int) -> None:
    with (
        Server(tmp_path, settings=BY_HOST[0]) as server,
        torch.cuda.device(CALLER),
        ExpertClient(server.url, timeout=30) as client,
        client.open_device_channel(NAMES, device=str(CALLER)) as channel,
    ):
        for name in NAMES:
            given, out = inputs(count), poisoned(count)
            channel.call(*given, out, model=name)
            assert torch.equal(out, expected(client, name, given))
        channel.check()


def test_several_channels_at_once(client: ExpertClient) -> None:
    channels = [client.open_device_channel(NAMES, device=str(CALLER), num_slots=1) for _ in range(4)]
    streams = [torch.cuda.Stream(CALLER) for _ in channels]  # type: ignore[no-untyped-call]
    made: list[tuple[str, Any, Tensor]] = []
    for number, (channel, stream) in enumerate(zip(channels, streams, strict=True)):
        for turn in range(12):
            name, count = NAMES[(number + turn) % LAYERS], 1 + (number * 31 + turn * 7) % 120
            given, out = inputs(count), poisoned(count)
            made.append((name, given, out))
            stream.wait_stream(torch.cuda.current_stream(CALLER))
            with torch.cuda.stream(stream):
                channel.call(*given, out, model=name)
    for stream in streams:
        stream.synchronize()
    for name, given, out in made:
        assert torch.equal(out, expected(client, name, given))
    for channel in channels:
        channel.check()
        channel.close()


def test_invalid_calls_are_refused(client: ExpertClient, channel: DeviceChannel) -> None:
    """Before anything is enqueued."""
    x, ids, weights = inputs(3)
    for given, options, message in (
        ((x.float(), ids, weights), {}, r"^hidden_states: expected torch.bfloat16 \(3, 1024\) on "),
        ((x, ids.long(), weights), {}, r"^topk_ids: expected torch.int32 \(3, 4\)"),
        ((x, ids, weights[:2]), {}, r"^topk_weights: expected torch.float32 \(3, 4\)"),
        ((x.cpu(), ids, weights), {}, r"^hidden_states: expected .* on cuda"),
        ((x, ids, weights), {"slot": 2}, r"^slot: expected 0 to 1, got 2$"),
        ((x, ids, weights), {"model": "other"}, r"^model: expected one of tiny.layers.0, "),
        (inputs(513), {}, r"^tokens: expected at most 512, got 513$"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            channel.send(*given, **({"model": NAMES[0]} | options))
    for out, slot, message in (
        (poisoned(3), 2, r"^slot: expected 0 to 1, got 2$"),
        (poisoned(513), 0, r"^tokens: expected at most 512, got 513$"),
        (poisoned(3).float(), 0, r"^out: expected torch.bfloat16 \(3, 1024\) on "),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            channel.wait(out, slot=slot)
    with pytest.raises(InvalidRequestError, match=r"^max_tokens: expected 1 to 512, got 513$"):
        client.open_device_channel(NAMES, max_tokens=513, device=str(CALLER))


def test_a_caller_that_dies_leaves_others_alone(client: ExpertClient, server: Server) -> None:
    """Its channel is closed, and what it had is free."""

    def open_channels() -> set[int]:
        return {each["id"] for each in httpx.get(f"{server.url}/v1/channels").json()["channels"]}

    with client.open_device_channel(NAMES, device=str(CALLER)) as channel:
        before = open_channels()
        with endless_caller(server.url) as dying:
            assert dying.stdout is not None
            assert dying.stdout.readline() == "called\n"
            (its,) = open_channels() - before
            dying.kill()
        given, out = inputs(5), poisoned(5)
        channel.call(*given, out, model=NAMES[1])
        assert torch.equal(out, expected(client, NAMES[1], given))
        end = time.monotonic() + 10
        while its in open_channels():
            assert time.monotonic() < end
        channel.check()


def test_a_server_that_dies_leaves_nan(tmp_path: Path) -> None:
    """After the call's time, and the caller's memory stays."""
    with (
        Server(tmp_path) as server,
        torch.cuda.device(CALLER),
        ExpertClient(server.url, timeout=8) as client,
        client.open_device_channel(NAMES, device=str(CALLER)) as channel,
    ):
        given, out = inputs(3), poisoned(3)
        channel.call(*given, out, model=NAMES[0])
        torch.cuda.synchronize()
        assert not out.isnan().any()
        server.kill()
        for _ in range(2):
            channel.call(*given, out, model=NAMES[0])
        torch.cuda.synchronize()
        assert bool(out.isnan().all())
        with pytest.raises(ServerUnreachableError, match=r"^channel: a call's output has not come in time$"):
            channel.check()


@pytest.mark.parametrize("settings", ["", *BY_HOST])
def test_a_channel_that_is_opened_again_serves_former_graphs(tmp_path: Path, settings: str) -> None:
    """Once there is a server again; without one, it stays as it is."""
    if settings.startswith("devices") and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with (
        Server(tmp_path, settings=settings) as first,
        torch.cuda.device(CALLER),
        ExpertClient(first.url, timeout=8) as client,
        client.open_device_channel(NAMES, device=str(CALLER)) as channel,
    ):
        given, out = inputs(3), poisoned(3)
        wanted = expected(client, NAMES[1], given)
        with pytest.raises(
            InvalidRequestError, match=r"^channel: expected one whose outputs are NaN, got another"
        ):
            channel.reopen()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            channel.call(*given, out, model=NAMES[1])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted)
        first.kill()
        graph.replay()
        torch.cuda.synchronize()
        assert bool(out.isnan().all())
        with pytest.raises(ServerUnreachableError):
            channel.reopen()
        graph.replay()
        torch.cuda.synchronize()
        assert bool(out.isnan().all())
        with Server(tmp_path, first.port, settings):
            channel.reopen()
            for _ in range(3):
                out.fill_(torch.nan)
                graph.replay()
                torch.cuda.synchronize()
                assert torch.equal(out, wanted)
            channel.check()


_HOLDS = """
import os, sys, time, torch
from expertd_client import ExpertClient, ServerUnreachableError
from tests.service.channels.call_server import CALLER, NAMES, inputs
torch.cuda.set_device(CALLER)
client = ExpertClient(sys.argv[1], timeout=8)
channel = client.open_device_channel(NAMES, device=str(CALLER), nan_on_failure=False)
given = inputs(3)
out = channel.call(*given, model=NAMES[0])
torch.cuda.synchronize()
print("called", flush=True)
input()
channel.call(*given, out, model=NAMES[0])
ended = torch.cuda.Event()
ended.record()
while True:
    try:
        channel.check()
    except ServerUnreachableError:
        break
    time.sleep(0.01)
time.sleep(0.5)
print(ended.query(), flush=True)
os._exit(0)
"""


def test_a_stream_goes_no_further_where_nan_is_not_wanted(tmp_path: Path) -> None:
    """And the process can end."""
    program = [sys.executable, "-c", _HOLDS]
    with (
        Server(tmp_path) as server,
        subprocess.Popen(
            [*program, server.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        ) as caller,
    ):
        assert caller.stdout is not None
        assert caller.stdout.readline() == "called\n"
        server.kill()
        assert caller.communicate("\n", timeout=60)[0] == "False\n"
        assert caller.returncode == 0


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGTERM])
def test_another_server_computes_what_is_called(tmp_path: Path, ends: signal.Signals) -> None:
    """Of a graph that was captured before, and calls before and after, while no server is there."""
    with (
        Server(tmp_path) as first,
        torch.cuda.device(CALLER),
        ExpertClient(first.url, timeout=90, retry_seconds=60) as client,
        client.open_device_channel(NAMES, device=str(CALLER)) as channel,
    ):
        given, out = inputs(3), poisoned(3)
        expected_by_name = [expected(client, name, given) for name in NAMES]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            channel.call(*given, out, model=NAMES[0])
        outs = [poisoned(3) for _ in range(6)]
        for turn in range(3):
            channel.call(*given, outs[turn], model=NAMES[turn % LAYERS])
        torch.cuda.synchronize()
        first.process.send_signal(ends)
        first.process.wait()
        for turn in range(3, 6):
            channel.call(*given, outs[turn], model=NAMES[turn % LAYERS])
        graph.replay()
        with Server(tmp_path, first.port) as second:
            torch.cuda.synchronize()
            channel.check()
            for turn, each in enumerate(outs):
                assert torch.equal(each, expected_by_name[turn % LAYERS])
            assert torch.equal(out, expected_by_name[0])
            second.close()
        began = time.monotonic()
        channel.close()
        assert time.monotonic() - began < 5  # it does not look for a server for as long as calls would wait
