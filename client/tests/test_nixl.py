"""Channels over NIXL: right answers, and ends that die."""

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from expertd_client import (
    DeadlineError,
    ExpertClient,
    InvalidRequestError,
    ServerBusyError,
    TransportUnavailableError,
    UnknownModelError,
)
from expertd_client.engine import PluginSettings, RemoteLayer, RemoteServer
from expertd_client.nixl import installed
from tests.callers import Connect
from tests.expertd import HIDDEN, MODEL, NUM_EXPERTS, TOP_K, RunningServer, channels_in, running_server
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.slow,  # a server, and two processes for each channel
    pytest.mark.skipif(find_spec("nixl_cu13") is None, reason="needs the package nixl-cu13"),
]
thorough = pytest.mark.thorough
# With the routing given, a token's bits depend on nothing else in its step, as on a GPU: a bit that
# differs was carried wrongly. `reference` rounds differently in other steps, by up to 2e-3 of a row's norm.
INVARIANT = () if torch.cuda.is_available() else ("backend=cpu",)
NIXL = ("channels.nixl=true", "channels.socket=null", *INVARIANT)


@pytest.fixture(scope="module", autouse=True)
def tcp() -> Iterator[None]:
    """As between machines without RDMA."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


@pytest.fixture(scope="module")
def nixl_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that has channels over NIXL alone."""
    with running_server(tmp_path_factory.mktemp("nixl"), *NIXL) as running:
        yield running


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[RunningServer]:
    """Without NIXL; its answers have the same bits."""
    with running_server(tmp_path, channels_in(tmp_path), *INVARIANT) as running:
        yield running


def rows(count: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(count).standard_normal((count, HIDDEN), np.float32).astype(dtype)


def routing(count: int) -> tuple[Any, Any]:
    """Experts and weights of each token, which with the layer's router may depend on other requests."""
    random_numbers = np.random.default_rng(count)
    ids = random_numbers.permuted(np.tile(np.arange(NUM_EXPERTS), (count, 1)), axis=1)[:, :TOP_K]
    return ids.astype(np.int32), random_numbers.random((count, TOP_K), np.float32)


def ends(server: RunningServer) -> list[int]:
    """The processes of the server's ends."""
    return [channel["owner"] for channel in server.channels()]


def children(process: int) -> list[int]:
    """The processes that a process has started, those that have ended too."""
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for task in tasks for child in _read(task).split()]


def callers_ends() -> list[int]:
    """The callers' ends that this process has started and that run."""
    found = []
    for child in children(os.getpid()):
        if b"expertd_client.nixl" in _read(Path(f"/proc/{child}/cmdline")).split(b"\0"):
            found.append(child)
    return found


def _read(file: Path) -> bytes:
    """What a file of /proc holds; nothing if its process or thread has ended."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("dtype", "output_dtype"),
    [
        (np.float32, np.float16),
        pytest.param(np.float16, ml_dtypes.bfloat16, marks=thorough),
        pytest.param(ml_dtypes.bfloat16, np.float32, marks=thorough),
    ],
)
def test_answers_are_those_of_http(
    connect: Connect, nixl_server: RunningServer, dtype: Any, output_dtype: Any
) -> None:
    http, nixl = connect(nixl_server.url), connect(nixl_server.url, transport="nixl")
    for count in (1, 7, 600, 0):  # within messages, and by writes
        x = rows(count, dtype)
        for given in ((), routing(count)):
            expected = http.infer(MODEL, x, *given, output_dtype=output_dtype)
            np.testing.assert_array_equal(nixl.infer(MODEL, x, *given, output_dtype=output_dtype), expected)
    assert nixl.client.transport == "nixl"
    assert {channel["memory"] for channel in nixl_server.channels()} == {"nixl"}


@pytest.mark.parametrize("adapters", [(), ("mlx5_0",)])
def test_auto_takes_nixl_where_there_is_rdma(
    nixl_server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    adapters: tuple[str, ...],
) -> None:
    monkeypatch.setattr(installed, "_ADAPTERS", tmp_path)
    for name in adapters:
        (tmp_path / name).mkdir()
    url = nixl_server.url.replace("127.0.0.1", "127.1")  # as of another machine: no address, but a name
    x = rows(3)
    with ExpertClient(url) as client, ExpertClient(nixl_server.url, transport="http") as http:
        with caplog.at_level(logging.INFO, "expertd_client"):
            np.testing.assert_array_equal(client.infer(MODEL, x), http.infer(MODEL, x))
        assert client.transport == ("nixl" if adapters else "http")
    assert not caplog.messages


def test_auto_takes_http_from_a_server_without_nixl(
    own_server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(installed, "_ADAPTERS", tmp_path)
    (tmp_path / "mlx5_0").mkdir()
    url = own_server.url.replace("127.0.0.1", "127.1")
    with ExpertClient(url) as client:
        for _ in range(2):
            assert client.infer(MODEL, rows(3)).shape == (3, HIDDEN)
        assert client.transport == "http"
    text = "transport nixl: channels: expected the setting channels.nixl, got false; taking http"
    assert caplog.messages == [text]


@thorough
@pytest.mark.parametrize("allowed", ["shm,self", "tcp,cma,self"])
def test_other_transports_of_ucx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: str) -> None:
    """Those that do not find out that a peer has gone, too."""
    monkeypatch.setenv("UCX_TLS", allowed)
    with (
        running_server(tmp_path, *NIXL) as server,
        ExpertClient(server.url, transport="nixl") as client,
        ExpertClient(server.url, transport="http") as http,
    ):
        for count in (1, 600):
            np.testing.assert_array_equal(client.infer(MODEL, rows(count)), http.infer(MODEL, rows(count)))


def test_calls_of_many_threads(nixl_server: RunningServer) -> None:
    failures: list[object] = []
    with (
        ExpertClient(nixl_server.url, transport="nixl") as client,
        ExpertClient(nixl_server.url, transport="http") as http,
    ):
        expected = {count: http.infer(MODEL, rows(count), *routing(count)) for count in range(1, 30)}

        def call(number: int) -> None:
            chosen = random.Random(number)
            for _ in range(20):
                count = chosen.randint(1, 29)
                got = client.infer(MODEL, rows(count), *routing(count))
                if not np.array_equal(got, expected[count]):
                    failures.append((number, count))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_refusals_are_those_of_the_server(connect: Connect, nixl_server: RunningServer) -> None:
    client = connect(nixl_server.url, transport="nixl")
    with pytest.raises(UnknownModelError):
        client.infer("unknown", rows(1))
    ids, weights = np.full((1, TOP_K), NUM_EXPERTS + 7, np.int32), np.ones((1, TOP_K), np.float32)
    with pytest.raises(InvalidRequestError, match="topk_ids"):
        client.infer(MODEL, rows(1), ids, weights)
    client.infer(MODEL, rows(1))
    with nixl_server.stopped(), pytest.raises(DeadlineError):
        client.infer(MODEL, rows(1), timeout=0.3)
    assert client.infer(MODEL, rows(1)).shape == (1, HIDDEN)


@thorough
def test_limits_and_the_setting(connect: Connect, tmp_path: Path) -> None:
    with running_server(tmp_path, *NIXL, "channels.max_channels=1") as server:
        first, second = (connect(server.url, transport="nixl") for _ in range(2))
        first.infer(MODEL, rows(1))
        with pytest.raises(ServerBusyError, match=r"channels\.max_channels"):
            second.infer(MODEL, rows(1))
        wait_for(lambda: len(callers_ends()) == 1, "the process of the channel that was refused ends")
        server.end()
        server.start_again("channels.nixl=false", "channels.socket=auto")
        with pytest.raises(TransportUnavailableError, match=r"channels\.nixl, got false"):
            second.infer(MODEL, rows(1))


def test_an_engine_takes_nixl_for_a_server_elsewhere(
    nixl_server: RunningServer, own_server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """By itself, with one channel, and says so; or else HTTP, with one warning."""
    caplog.set_level(logging.INFO, "expertd_client")
    x = torch.from_numpy(rows(40))
    ids, weights = torch.arange(4, dtype=torch.int32).repeat(40, 1), torch.rand(40, TOP_K)
    got = []
    for server in (nixl_server, own_server):
        elsewhere = f"http://127.1:{server.url.rpartition(':')[2]}"  # as far as the address says
        remote = RemoteServer(PluginSettings(elsewhere, max_tokens=16))
        layer = RemoteLayer(remote, MODEL, 0, remote.client.metadata(MODEL))
        remote._layers[MODEL] = layer
        for _ in range(2):
            out = torch.empty_like(x)
            layer.submit(x, ids, weights, 0, 1).wait(out)
            got.append(out)
        assert [each["memory"] for each in server.channels()] == (["nixl"] if server is nixl_server else [])
        if server is nixl_server:
            said = [message for message in caplog.messages if message.startswith("expertd: ")]
            assert said == ["expertd: calls go over a channel over NIXL"]
            remote._channel.close()
        remote.client.close()
    for each in got:
        torch.testing.assert_close(each, got[-1])
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    expected = "expertd: calls go over HTTP: channels: expected the setting channels.nixl"
    assert warning.getMessage().startswith(expected)


def test_a_channel_without_copies(nixl_server: RunningServer) -> None:
    with (
        ExpertClient(nixl_server.url, transport="nixl", retry_seconds=30.0) as client,
        ExpertClient(nixl_server.url, transport="http") as http,
        client.open_channel(MODEL, max_tokens=600, num_slots=2) as channel,
    ):
        for _ in range(2):
            for slot, count in zip(channel.slots, (3, 600), strict=True):
                slot.hidden_states[:count] = rows(count)
            tickets = [channel.submit(slot, n) for slot, n in zip(channel.slots, (3, 600), strict=True)]
            for ticket, count in zip(tickets, (3, 600), strict=True):
                np.testing.assert_allclose(
                    channel.wait(ticket), http.infer(MODEL, rows(count)), rtol=1e-4, atol=1e-5
                )
            assert tickets[0].compute_seconds > 0
            os.kill(ends(nixl_server)[-1], signal.SIGKILL)
        with pytest.raises(InvalidRequestError, match="device: expected None or cpu over NIXL, got 'cuda:0'"):
            client.open_channel(MODEL, max_tokens=1, device="cuda:0")


def test_a_channel_ends_with_the_client(nixl_server: RunningServer) -> None:
    with ExpertClient(nixl_server.url, transport="nixl") as client:
        client.infer(MODEL, rows(1))
        (end,) = ends(nixl_server)
    wait_for(lambda: not nixl_server.channels(), "the server closes the channel")
    wait_for(lambda: not Path(f"/proc/{end}").exists(), "the server's end ends")
    wait_for(lambda: not callers_ends(), "the caller's end ends")


_CALLER = """
import sys, numpy
from expertd_client import ExpertClient
client = ExpertClient(sys.argv[1], transport="nixl")
while True:
    client.infer(sys.argv[2], numpy.ones((int(sys.argv[3]), int(sys.argv[4])), numpy.float32))
    print(flush=True)
"""


@thorough
@pytest.mark.parametrize("whose", ["caller", "server"])
def test_calls_outlive_an_end_that_is_killed(nixl_server: RunningServer, whose: str) -> None:
    """Another channel is opened, and the calls are made again."""
    failures: list[object] = []
    seen: set[str] = set()
    done = threading.Event()
    with (
        ExpertClient(nixl_server.url, transport="nixl", retry_seconds=30.0) as client,
        ExpertClient(nixl_server.url, transport="http") as http,
    ):
        expected = {count: http.infer(MODEL, rows(count), *routing(count)) for count in (1, 600)}

        def call() -> None:
            while not done.is_set():
                for count, output in expected.items():
                    if not np.array_equal(client.infer(MODEL, rows(count), *routing(count)), output):
                        failures.append(count)

        def is_in_use() -> bool:
            return any(each["requests"] > 5 and each["id"] not in seen for each in nixl_server.channels())

        thread = threading.Thread(target=call)
        thread.start()
        try:
            for _ in range(2):
                wait_for(is_in_use, "calls are made")
                channels = nixl_server.channels()
                seen.update(channel["id"] for channel in channels)
                os.kill(callers_ends()[-1] if whose == "caller" else channels[-1]["owner"], signal.SIGKILL)
        finally:
            done.set()
            thread.join()
    assert not failures


@thorough
def test_calls_outlive_a_server_that_is_started_again(connect: Connect, tmp_path: Path) -> None:
    with running_server(tmp_path, *NIXL) as server:
        client = connect(server.url, transport="nixl", retry_seconds=30.0)
        expected = client.infer(MODEL, rows(4))
        for how in (signal.SIGTERM, signal.SIGKILL):
            server.end(how)
            server.start_again()
            np.testing.assert_array_equal(client.infer(MODEL, rows(4)), expected)


@thorough
def test_both_ends_on_one_core(tmp_path: Path) -> None:
    """Nobody keeps the core from those for whom it waits."""
    core = {min(os.sched_getaffinity(0))}
    calls = _CALLER.replace("while True", "for _ in range(100)")
    code = f"import os; os.sched_setaffinity(0, {core})\n{calls}"
    with running_server(tmp_path, *NIXL) as server:
        for thread in Path(f"/proc/{server.process.pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), core)
        command = [sys.executable, "-c", code, server.url, MODEL, "5", str(HIDDEN)]
        assert subprocess.run(command, check=True, capture_output=True, timeout=300).stdout == b"\n" * 100
