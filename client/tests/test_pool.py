"""Several servers as one: replicas, divided experts, and servers that die, hang, drain, and come back."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from prometheus_client import REGISTRY

from expertd_client import (
    AsyncExpertClient,
    ExpertClient,
    InvalidRequestError,
    ServerUnreachableError,
    UnknownModelError,
)
from expertd_client.engine import PluginSettings, RemoteServer
from tests.expertd import HIDDEN, LAYER, MODEL, NUM_EXPERTS, TOP_K, RunningServer, channels_in, running_server
from tests.rounding import assert_rounded
from tests.waiting import wait_for

pytestmark = pytest.mark.slow  # server processes
RNG = np.random.default_rng(57)
X = RNG.standard_normal((9, HIDDEN), dtype=np.float32)
IDS = np.argsort(RNG.random((9, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
WEIGHTS = RNG.random((9, TOP_K), dtype=np.float32)
Array = npt.NDArray[np.float32]


@contextmanager
def servers(
    directory: Path, *layers: dict[str, Any], settings: Sequence[str] = ()
) -> Iterator[list[RunningServer]]:
    """One for each layer, with channels."""
    with ExitStack() as stack:
        found = []
        for number, layer in enumerate(layers):
            own = directory / str(number)
            own.mkdir()
            channel = channels_in(own)
            found.append(stack.enter_context(running_server(own, channel, *settings, layers=[layer])))
        yield found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    """Two servers with the same layer."""
    with servers(tmp_path_factory.mktemp("pair"), LAYER, LAYER) as found:
        yield found


@pytest.fixture(scope="module")
def expected(pair: list[RunningServer]) -> Array:
    """The output of the layer."""
    with ExpertClient(pair[0].url) as client:
        return client.infer(MODEL, X, IDS, WEIGHTS)


class Callers:
    """Threads that call until the end, by both transports and in an event loop, and check every output."""

    def __init__(self, urls: Any, expected: Array, **options: Any) -> None:
        self._expected, self._over = expected, False
        self._pause = 0.0  # seconds between calls, where only a server's state is waited for
        self.answers, self.failures = 0, list[BaseException]()
        self.clients = [ExpertClient(urls, transport=name, **options) for name in ("channel", "http")]
        self._lock = threading.Lock()
        kinds = [partial(self._call, client) for client in self.clients for _ in range(2)]
        kinds.append(partial(self._in_loop, urls, options))
        self._threads = [threading.Thread(target=self._guarded, args=(kind,)) for kind in kinds]

    def __enter__(self) -> "Callers":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for thread in self._threads:
            thread.join()
        for client in self.clients:
            client.close()

    @contextmanager
    def unhurried(self) -> Iterator[None]:
        """Leave the cores to servers that start."""
        self._pause = 0.02
        yield
        self._pause = 0.0

    def go_on(self, calls: int = 60) -> None:
        """Wait until this many more calls are answered."""
        end = self.answers + calls
        wait_for(lambda: self.answers >= end or bool(self.failures), "calls are answered")
        assert not self.failures

    def _guarded(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self.failures.append(error)

    def _call(self, client: ExpertClient) -> None:
        while not self._over:
            self._check(client.infer(MODEL, X, IDS, WEIGHTS))
            time.sleep(self._pause)

    def _in_loop(self, urls: Any, options: dict[str, Any]) -> None:
        asyncio.run(self._call_in_loop(urls, options))

    async def _call_in_loop(self, urls: Any, options: dict[str, Any]) -> None:
        async with AsyncExpertClient(urls, **options) as client:
            while not self._over:
                self._check(await client.infer(MODEL, X, IDS, WEIGHTS))
                await asyncio.sleep(self._pause)

    def _check(self, output: Array) -> None:
        assert_rounded(output, self._expected)
        with self._lock:
            self.answers += 1


def states(client: ExpertClient) -> dict[str, str]:
    return {server.url: server.state for server in client.servers()}


def wait_until_all(callers: Callers, url: str, *wanted: str) -> None:
    """Know that a server is in one of these states."""
    for client in callers.clients:
        wait_for(partial(_is_any, client, url, wanted), f"{url} is {' or '.join(wanted)}")


def _is_any(client: ExpertClient, url: str, wanted: Sequence[str]) -> bool:
    return states(client)[url] in wanted


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_no_call_is_lost_when_a_server_goes(
    pair: list[RunningServer], expected: Array, end: signal.Signals
) -> None:
    """It is killed, or drains, and takes part again once it is back."""
    urls = [server.url for server in pair]
    with Callers(urls, expected) as callers:
        for server in pair:
            callers.go_on()
            server.end(end)
            callers.go_on()
            with callers.unhurried():
                wait_until_all(callers, server.url, "down", "draining")
                server.start_again()
                wait_until_all(callers, server.url, "up")
        callers.go_on()


def test_calls_leave_a_server_that_hangs(pair: list[RunningServer], expected: Array) -> None:
    urls = [server.url for server in pair]
    with Callers(urls, expected, failover_seconds=0.4) as callers:
        for server in pair:
            callers.go_on()
            with server.stopped():
                callers.go_on()
                wait_until_all(callers, server.url, "down")
                callers.go_on()
            wait_until_all(callers, server.url, "up")


def test_nobody_leaves_the_only_server(pair: list[RunningServer], expected: Array) -> None:
    """It hangs for a while, and then answers."""
    with Callers([pair[0].url], expected, failover_seconds=0.2) as callers:
        callers.go_on()
        with pair[0].stopped():
            wait_until_all(callers, pair[0].url, "down")
        callers.go_on()


def test_what_is_asked_of_a_pool_leaves_a_server_that_hangs(pair: list[RunningServer]) -> None:
    urls = [server.url for server in pair]
    # Long enough for the other one, which may be slow.
    with pair[0].stopped(), ExpertClient(urls, failover_seconds=2, timeout=60) as client:
        assert client.server().name == "expertd"
        assert client.metadata(MODEL).hidden_size == HIDDEN
        assert [status.name for status in client.models()] == [MODEL]
        with client.open_channel(MODEL, max_tokens=4):
            assert states(client) == {urls[0]: "down", urls[1]: "up"}


def test_both_servers_get_calls(pair: list[RunningServer], expected: Array) -> None:
    """When one thread would have to wait for another."""

    def counts() -> list[int]:
        return [
            server.ask(f"/v2/models/{MODEL}/stats")["model_stats"][0]["inference_count"] for server in pair
        ]

    before = counts()
    with Callers([server.url for server in pair], expected) as callers:
        callers.go_on(200)
    assert all(now > then for now, then in zip(counts(), before, strict=True))


def test_a_layer_whose_experts_are_divided(tmp_path: Path, expected: Array) -> None:
    """The sum has the whole layer's numbers, and the same bits each time; a part that is missing is named."""
    half = NUM_EXPERTS // 2
    parts = [LAYER | {"local_experts": f"{first}-{first + half - 1}"} for first in (0, half)]
    with servers(tmp_path, *parts) as found, ExpertClient([each.url for each in found[::-1]]) as client:
        output = client.infer(MODEL, X, IDS, WEIGHTS)
        np.testing.assert_allclose(output, expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())
        for _ in range(3):
            np.testing.assert_array_equal(client.infer(MODEL, X, IDS, WEIGHTS), output)
        rounded = client.infer(MODEL, X, IDS, WEIGHTS, output_dtype="float16")
        np.testing.assert_array_equal(rounded, output.astype(np.float16))
        # One token, with experts of one part alone; and tokens that the servers route.
        ids, halves = np.arange(TOP_K, dtype=np.int32)[None], []
        for each in found:
            with ExpertClient(each.url) as alone:
                halves.append((alone.infer(MODEL, X[:1], ids, WEIGHTS[:1]), alone.infer(MODEL, X)))
        np.testing.assert_array_equal(client.infer(MODEL, X[:1], ids, WEIGHTS[:1]), halves[0][0])
        np.testing.assert_array_equal(client.infer(MODEL, X), halves[0][1] + halves[1][1])
        assert client.metadata(MODEL).local_experts is None
        assert client.ready(MODEL)
        found[1].end()
        assert not client.ready(MODEL)
        with pytest.raises(ServerUnreachableError):
            client.infer(MODEL, X)
        with pytest.raises(
            ServerUnreachableError, match="expected servers with all 16 experts, each once, got 8"
        ):
            client.infer(MODEL, X)


def test_different_weights_are_refused(tmp_path: Path, pair: list[RunningServer]) -> None:
    refused = pytest.raises(InvalidRequestError, match=r"^weights_id of demo: expected the same at all")
    with (
        servers(tmp_path, LAYER | {"weights": {"seed": 1}}) as (other,),
        ExpertClient([pair[0].url, other.url]) as client,
        refused,
    ):
        client.infer(MODEL, X)


def test_a_list_of_servers_that_changes(tmp_path: Path, pair: list[RunningServer], expected: Array) -> None:
    """A file, which is read again while calls are made."""
    file = tmp_path / "servers"
    file.write_text(f"# one\n\n{pair[0].url}\n")
    with Callers(f"file:{file}", expected) as callers:
        callers.go_on()
        assert list(states(callers.clients[0])) == [pair[0].url]
        file.write_text("\n".join(server.url for server in pair))
        wait_for(lambda: len(states(callers.clients[0])) == 2, "the second is added")
        callers.go_on()
        file.write_text(pair[1].url)
        wait_for(lambda: list(states(callers.clients[0])) == [pair[1].url], "the first is taken out")
        callers.go_on()
        file.unlink()  # as it may be for a moment
        callers.go_on(200)


def test_what_a_pool_says(pair: list[RunningServer]) -> None:
    with ExpertClient([server.url for server in pair]) as client:
        assert [status.name for status in client.models()] == [MODEL]
        assert client.ready(MODEL)
        assert client.ready()
        assert client.live()
        assert client.server().name == "expertd"
        assert not client.ready("other")
        with pytest.raises(UnknownModelError):
            client.infer("other", X)
        with client.open_channel(MODEL, max_tokens=16) as channel:
            channel.slots[0].hidden_states[:9] = X
            np.testing.assert_array_equal(
                channel.wait(channel.submit(channel.slots[0], 9)), client.infer(MODEL, X)
            )


def test_a_channel_moves_to_another_server(tmp_path: Path, pair: list[RunningServer]) -> None:
    urls = [server.url for server in pair]
    with ExpertClient(urls, retry_seconds=60) as client, client.open_channel(MODEL, max_tokens=16) as channel:
        slot = channel.slots[0]
        slot.hidden_states[:9] = X
        first = np.array(channel.wait(channel.submit(slot, 9)))
        pair[0].end()
        np.testing.assert_array_equal(channel.wait(channel.submit(slot, 9)), first)
        pair[0].start_again()


def test_a_channel_leaves_a_server_that_hangs(pair: list[RunningServer]) -> None:
    urls = [server.url for server in pair]
    with (
        ExpertClient(urls, retry_seconds=60, failover_seconds=0.4) as client,
        client.open_channel(MODEL, max_tokens=16) as channel,
    ):
        slot = channel.slots[0]
        slot.hidden_states[:9] = X
        first = np.array(channel.wait(channel.submit(slot, 9)))
        for _ in pair:  # also for one that was away before: nobody but the channel has called it since
            (holder,) = (server for server in pair if server.channels())
            with holder.stopped():
                np.testing.assert_array_equal(channel.wait(channel.submit(slot, 9)), first)
            wait_for(lambda url=holder.url: states(client)[url] == "up", "it is back")  # type: ignore[misc]
            wait_for(lambda server=holder: not server.channels(), "its channel has ended")  # type: ignore[misc]


@pytest.mark.timing
@pytest.mark.parametrize("transport", ["channel", "http"])
def test_a_call_leaves_a_server_that_hangs_in_time(transport: Any, pair: list[RunningServer]) -> None:
    """Within `failover_seconds`, which are 1."""

    def counts(outcome: str) -> dict[str, int]:
        return {server.url: server.ended.get(outcome, 0) for server in client.servers()}

    longest = 0.0
    with ExpertClient([server.url for server in pair], transport=transport) as client:
        for _ in range(3):  # a call may have left the server just before
            before = counts("answered")
            client.infer(MODEL, X, IDS, WEIGHTS)
            (used,) = (server for server in pair if counts("answered")[server.url] > before[server.url])
            with used.stopped():
                began = time.monotonic()
                client.infer(MODEL, X, IDS, WEIGHTS)
                longest = max(longest, time.monotonic() - began)
            wait_for(lambda: set(states(client).values()) == {"up"}, "it is back")
        assert sum(counts("unreachable").values())
    assert longest < 1


@pytest.mark.parametrize("transport", ["channel", "http"])
def test_an_engine_calls_a_pool(
    transport: str, tmp_path: Path, pair: list[RunningServer], expected: Array
) -> None:
    """As a plugin does, by a file; one server goes between two calls."""
    layer = LAYER | {"name": "m.layers.0"}
    with servers(tmp_path, layer, layer) as found:
        file = tmp_path / "servers"
        file.write_text("\n".join(server.url for server in found))
        remote = RemoteServer(PluginSettings(f"file:{file}", "m", transport=transport)).layer(0)
        x, ids, weights = (torch.from_numpy(value) for value in (X, IDS, WEIGHTS))
        out = torch.empty(X.shape)
        for each in found:
            labels = {"server": each.url, "state": "up"}
            assert REGISTRY.get_sample_value("expertd_pool_servers", labels) == 1
        for server in (None, *found):
            if server is not None:
                server.end()
            remote.submit(x, ids, weights, 0, 1).wait(out)
            assert_rounded(out.numpy(), expected)
            out.fill_(torch.nan)
            if server is not None:
                server.start_again()
        assert [state.calls for state in remote.server.client.servers()] == [0, 0]
        remote.server.client.close()


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with ExpertClient([f"http://127.0.0.1:{port}", f"http://localhost:{port}"]) as client:
        with pytest.raises(ServerUnreachableError):
            client.infer(MODEL, X)
        assert not client.ready()
