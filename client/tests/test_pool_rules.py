"""Which server of a pool gets a call, and what a pool makes of errors; without servers."""

import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertd_client import (
    AccessDeniedError,
    DeadlineError,
    ExpertClient,
    ExpertError,
    InvalidRequestError,
    ServerBusyError,
    ServerUnreachableError,
    TransportUnavailableError,
    UnknownModelError,
)
from expertd_client.calls import LayerCall, layer_call
from expertd_client.deadline import Deadline
from expertd_client.metadata import ModelMetadata
from expertd_client.pool import Member, ServerPool
from expertd_client.sources import Fixed
from expertd_client.steps import Sleep, Steps, run
from expertd_client.watch import Watch
from tests.fakes import FakeServer, Peer, Request, answer, echo, fake_server
from tests.waiting import wait_for

X = np.random.default_rng(3).standard_normal((2, 4), dtype=np.float32)


class Server:
    """Answers by `says`: an error, or None."""

    is_local, transport, is_closed = True, "http", False

    def __init__(self, url: str, told: ModelMetadata | None = None) -> None:
        self.url, self.calls, self.says = url, 0, list[Exception]()
        self.told = told or ModelMetadata("m", 4, 2, "FP32", 8)

    def metadata(self, model: str, deadline: Deadline) -> Steps[ModelMetadata]:
        yield from ()
        if self.is_closed:
            raise ExpertError("client: expected an open one, got a closed one")
        return self.told

    def infer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        yield from ()
        self.calls += 1
        if self.says:
            raise self.says.pop(0)

    def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Steps[Any]:
        yield from ()
        if self.is_closed:
            raise ExpertError("client: expected an open one, got a closed one")
        return self.url

    def close(self) -> Steps[None]:
        yield from ()
        self.is_closed = True

    def break_off(self) -> None:
        pass


def pool_of(*servers: Server, clock: Callable[[], float] = time.monotonic) -> ServerPool:
    by_url: dict[str, Any] = {server.url: server for server in servers}
    return ServerPool(Fixed(list(by_url)), by_url.__getitem__, 1.0, clock=clock)


def infer(pool: ServerPool, retry_seconds: float = 0.0) -> None:
    run(pool.infer(layer_call("m", X), Deadline(10, retry_seconds)))


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize(
    "error",
    [
        ServerUnreachableError("gone"), ServerBusyError("full", 503, 1.0), ServerBusyError("full", 429, 1.0),
        ServerBusyError("timeout: expected more, as the queue is long", 503, 1.0),
        ServerBusyError("shutting down", 503), UnknownModelError("unloaded", 404),
    ],
    ids=["gone", "full", "limited", "long", "draining", "unloaded"],
)  # fmt: skip
def test_another_server_answers(error: Exception) -> None:
    first, second = Server("http://a"), Server("http://b")
    pool = pool_of(first, second)
    first.says = [error]
    infer(pool)
    assert (first.calls, second.calls) == (1, 1)
    infer(pool)
    assert (first.calls, second.calls) == (1, 2)


@pytest.mark.usefixtures("in_order")
def test_nothing_wrong_is_repeated() -> None:
    first, second = Server("http://a"), Server("http://b")
    pool = pool_of(first, second)
    first.says = [InvalidRequestError("wrong", 400)]
    with pytest.raises(InvalidRequestError):
        infer(pool)
    assert second.calls == 0
    for text in ("timeout: not in time", "the request's timeout of 9 microseconds expires"):
        pool = pool_of(first, second)
        first.says = [ServerBusyError(text, 503)]
        with pytest.raises(ServerBusyError):
            infer(pool)
        assert second.calls == 0
        assert [state.state for state in pool.states()] == ["up", "up"]  # it is the call that has no time


@pytest.mark.usefixtures("in_order")
def test_who_denies_access_is_named() -> None:
    first, second = Server("http://a"), Server("http://b")
    pool = pool_of(first, second)
    first.says = [AccessDeniedError("key: expected a known one", 401)]
    with pytest.raises(AccessDeniedError, match=r"^server http://a: key: expected a known one$"):
        infer(pool)
    assert second.calls == 0


def test_a_full_pool_is_asked_again() -> None:
    """When its servers say, `max_retries` times; not each of them at each time."""
    servers = [Server(f"http://{name}") for name in "ab"]
    by_url: dict[str, Any] = {server.url: server for server in servers}
    pool = ServerPool(Fixed(list(by_url)), by_url.__getitem__, 1.0, max_retries=2)
    for server in servers:
        server.says = [ServerBusyError("full", 503, 0.01) for _ in range(2)]
    infer(pool)
    assert sum(server.calls for server in servers) == 5
    for server in servers:
        server.says = [ServerBusyError("full", 503, 0.01) for _ in range(3)]
    with pytest.raises(ServerBusyError):
        infer(pool)


def test_servers_that_leave_the_list_in_the_middle_of_a_call() -> None:
    """While others are asked: they are closed, and not asked any more."""
    servers = {url: Server(url) for url in ("http://a", "http://b", "http://c")}
    urls = list(servers)[:2]
    by_url: dict[str, Any] = servers

    class Listed:
        def urls(self) -> list[str]:
            return urls

    class Changing(Server):
        def metadata(self, model: str, deadline: Deadline) -> Steps[ModelMetadata]:
            nonlocal urls
            urls = ["http://c"]
            pool.update()
            yield from ()
            raise ServerUnreachableError("gone")

    servers["http://a"] = Changing("http://a")
    pool = ServerPool(Listed(), by_url.__getitem__, 1.0)
    infer(pool)
    assert [server.calls for server in servers.values()] == [0, 0, 1]
    assert run(pool.request("GET", "/v2", Deadline(10))) == "http://c"


@pytest.mark.usefixtures("in_order")
def test_a_call_without_time_says_little_of_a_server() -> None:
    """It is not down, but gets fewer calls, and is asked whether it lives."""

    class Slow(Server):
        def metadata(self, model: str, deadline: Deadline) -> Steps[ModelMetadata]:
            if deadline.seconds < 1:
                while True:
                    yield Sleep(0.01, deadline)
            return (yield from super().metadata(model, deadline))

        def infer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
            while deadline.seconds < 1:
                yield Sleep(0.01, deadline)
            yield from super().infer(call, deadline)

    slow, other = Slow("http://a"), Server("http://b")
    pool = pool_of(slow, other)
    member = pool.members[0]
    call = layer_call("m", X)
    for _ in range(2):  # it is asked for its layers, and for an output
        with pytest.raises(DeadlineError):
            run(pool.infer(call, Deadline(0.02)))
        assert member.state == "up"
        assert pool.waits(member, 10.0)
        assert not pool.waits(member, 10.0)
        if not other.calls:
            run(pool.metadata("m", Deadline(10)))
    run(pool.infer(call, Deadline(0.02)))
    assert other.calls == 1


@pytest.mark.usefixtures("in_order")
def test_a_long_step_is_not_a_hang() -> None:
    """Its server says that it lives whenever it is asked, so the call stays there."""
    asked: list[str] = []

    class Busy(Server):
        is_broken = False

        def infer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
            self.calls += 1
            while len(asked) < 3 and not self.is_broken:
                yield Sleep(0.01, deadline)

        def break_off(self) -> None:
            self.is_broken = True

    class Probe(Server):
        def request(self, method: str, path: str, deadline: Deadline, body: object = None) -> Steps[Any]:
            asked.append(path)
            return (yield from super().request(method, path, deadline, body))

    busy, other = Busy("http://a"), Server("http://b")
    by_url: dict[str, Any] = {server.url: server for server in (busy, other)}
    pool = ServerPool(Fixed(list(by_url)), by_url.__getitem__, 0.2)
    make_probe: Any = Probe
    pool.on_call = Watch(pool, make_probe).wake
    run(pool.infer(layer_call("m", X), Deadline(60)))
    assert set(asked) == {"/v2/health/live"}
    assert (busy.calls, other.calls, busy.is_broken, pool.members[0].state) == (1, 0, False, "up")
    run(pool.close())


def test_channels_are_of_servers_with_all_experts_here_or_over_nixl() -> None:
    told = {"name": "m", "hidden_size": 4, "top_k": 2, "datatype": "FP32", "num_experts": 2}
    parts = [Server(f"http://{n}", ModelMetadata(**told, local_experts=frozenset({n}))) for n in range(2)]  # type: ignore[arg-type]
    whole, far = (Server(url, ModelMetadata(**told)) for url in ("http://whole", "http://far"))  # type: ignore[arg-type]
    far.is_local = False

    def channel_of(*servers: Server, body: Any) -> Any:
        return run(pool_of(*servers).request("POST", "/v1/channels", Deadline(10), body))

    for named in ({"model": "m"}, {"models": ["m"]}):
        body = {**named, "memory": "host"}
        assert channel_of(*parts, far, whole, body=body) == "http://whole"
        for others in (parts, [*parts, far], [far]):
            with pytest.raises(TransportUnavailableError, match=r"^pool: expected .* on this machine, got "):
                channel_of(*others, body=body)
        assert channel_of(*parts, far, whole, body={**named, "memory": {"nixl": {}}}) == "http://far"


def test_repeats_have_a_budget() -> None:
    """A pool that is full is not asked many times as often because of that."""
    servers = [Server(f"http://{name}") for name in "abcdefgh"]
    pool = pool_of(*servers)
    for server in servers:
        server.says = [ServerBusyError("full", 503, 1.0) for _ in range(1000)]
    for _ in range(100):
        with pytest.raises(ServerBusyError):
            infer(pool)
    assert 100 < sum(server.calls for server in servers) <= 100 + 10 + 10 + 1


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize(
    "error", [ServerUnreachableError("gone"), ServerBusyError("shutting down", 503)], ids=["gone", "drains"]
)
def test_many_calls_leave_a_server_that_goes(error: Exception) -> None:
    """All that were under way there, more than there may be repeats of full servers."""
    first, second = Server("http://a"), Server("http://b")
    pool = pool_of(first, second)
    for _ in range(100):
        first.says = [error]
        for member in pool.members:
            pool.mark(member, "up")
            member.seconds.clear()
        infer(pool)
    assert (first.calls, second.calls) == (100, 100)


class Timed(Server):
    """Takes `seconds`, which pass on the pool's clock."""

    def __init__(self, url: str, seconds: float, passes: Callable[[float], None]) -> None:
        super().__init__(url)
        self.seconds, self._passes = seconds, passes

    def infer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        yield from super().infer(call, deadline)
        self._passes(self.seconds)


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def passes(self, seconds: float) -> None:
        self.now += seconds


def test_calls_go_to_the_faster_server_and_stay() -> None:
    clock = Clock()
    first, second = Timed("http://a", 0.010, clock.passes), Timed("http://b", 0.009, clock.passes)
    pool = pool_of(first, second, clock=lambda: clock.now)
    for _ in range(50):
        infer(pool)
    slow, fast = sorted((first, second), key=lambda server: -server.calls)
    assert fast.calls <= 2  # 10 % is no reason to change
    slow.seconds *= 3
    before = slow.calls, fast.calls
    for _ in range(50):
        infer(pool)
    assert slow.calls - before[0] <= 2
    assert fast.calls - before[1] >= 48


def test_a_slow_server_of_many_is_asked_now_and_then() -> None:
    """At first, and again when it may have become faster."""
    clock = Clock()
    slow = Timed("http://slow", 0.1, clock.passes)
    others = [Timed(f"http://{number}", 0.01, clock.passes) for number in range(7)]
    pool = pool_of(slow, *others, clock=lambda: clock.now)
    for _ in range(1000):  # 10 s, in which what is known fades to a quarter
        infer(pool)
    assert slow.calls == 1
    assert all(server.calls > 1 for server in others)
    slow.seconds = 0.001
    for _ in range(1500):
        infer(pool)
    assert slow.calls > 100


def test_many_callers_do_not_choose_the_same_server() -> None:
    """Neither at their start, nor when a server is added that none of them knows."""
    servers = [Server(f"http://{number}") for number in range(8)]
    new = Server("http://new")
    by_url: dict[str, Any] = {server.url: server for server in [*servers, new]}
    urls = [server.url for server in servers]

    class Listed:
        def urls(self) -> list[str]:
            return urls

    clock = Clock()
    pools = [ServerPool(Listed(), by_url.__getitem__, 1.0, clock=lambda: clock.now) for _ in range(400)]
    for pool in pools:
        infer(pool)
    assert max(server.calls for server in servers) < 100  # 50 on average, with a deviation of 7
    for pool in pools:
        for member in pool.members:
            member.took(X.shape[0].bit_length(), 0.01, clock.now)
    urls = [*urls, new.url]
    for pool in pools:
        pool.update()
        infer(pool)
    assert 10 < new.calls < 100  # likewise


@pytest.mark.parametrize(
    ("parts", "state", "expected"),
    [
        ([None, None], "up", True),
        ([None, None], "down", False),
        (["ab", "ab"], "up", True),
        (["ab", "cd"], "up", False),
        (["ab", None], "up", True),
        ([None, "ab"], "up", False),
    ],
)
def test_who_can_be_done_without(parts: list[str | None], state: Any, expected: bool) -> None:
    """Calls of a server that hangs are worth breaking off only if another one has the same experts."""
    numbers = {"ab": frozenset({0, 1}), "cd": frozenset({2, 3}), None: None}
    told = [
        ModelMetadata("m", 4, 2, "FP32", 4, weights_id="w", local_experts=numbers[part]) for part in parts
    ]
    pool = pool_of(*(Server(url, each) for url, each in zip(("http://a", "http://b"), told, strict=True)))
    first, second = pool.members
    for member, each in zip(pool.members, told, strict=True):
        member.layers["m"] = each, 0.0
    pool.mark(second, state)
    assert pool.can_do_without(first) is expected


def test_a_call_that_is_garbage_ends_in_any_thread_at_any_time() -> None:
    """Also in one that holds the pool's lock, as for its states."""

    class Slow(Server):
        def infer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
            yield Sleep(10, deadline)

    pool = pool_of(Slow("http://a"))
    call = pool.infer(layer_call("m", X), Deadline(20))
    next(call)
    cycle: list[Any] = [call]
    cycle.append(cycle)
    assert pool.states()[0].calls == 1
    del call, cycle

    def collect() -> None:
        with pool._lock:
            gc.collect()

    collecting = threading.Thread(target=collect, daemon=True)
    collecting.start()
    collecting.join(60)
    assert not collecting.is_alive()
    assert pool.states()[0].calls == 0


def test_what_waits_counts() -> None:
    members = [Member(Server(f"http://{name}")) for name in "ab"]  # type: ignore[arg-type]
    for member in members:
        member.took(3, 1.0, 0.0)
    members[0].begun = {object(): 0.0 for _ in range(3)}
    assert members[0].expected(3, 0.0) == 4 * members[1].expected(3, 0.0) == 4.0
    assert members[1].expected(3, 5.0) == pytest.approx(0.5)  # it is forgotten
    assert members[1].expected(2, 0.0) == 0.0  # another size says nothing
    assert members[0].expected(2, 3.0) == 12.0  # but calls that have waited for 3 s do


@pytest.mark.parametrize(
    ("name", "other"), [("hidden_size", 5), ("top_k", 3), ("num_experts", 9), ("weights_id", "two")]
)
def test_different_layers_of_one_name_are_refused(name: str, other: Any) -> None:
    told: dict[str, Any] = {"hidden_size": 4, "top_k": 2, "num_experts": 8, "weights_id": "one"}
    servers = [
        Server(url, ModelMetadata("m", datatype="FP32", **values))
        for url, values in (("http://a", told), ("http://b", told | {name: other}))
    ]
    got = rf"got {told[name]} at http://a, {other} at http://b$"
    with pytest.raises(InvalidRequestError, match=rf"^{name} of m: expected the same at all servers, {got}"):
        infer(pool_of(*servers))


def test_all_tokens_go_to_the_part_with_shared_experts() -> None:
    """Also if a server is asked what it has because it was away, between two steps of a call."""
    told: dict[str, Any] = {"hidden_size": 4, "top_k": 1, "num_experts": 2, "datatype": "FP32"}
    sizes: list[int] = []

    class Part(Server):
        def infer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
            yield from super().infer(call, deadline)
            sizes.append(call.shape[0])

    class Away(Part):
        def metadata(self, model: str, deadline: Deadline) -> Steps[ModelMetadata]:
            pool.mark(pool.members[0], "down")
            pool.mark(pool.members[0], "up")
            return super().metadata(model, deadline)

    first = Part(
        "http://a", ModelMetadata("m", local_experts=frozenset({0}), shared_experts="included", **told)
    )
    pool = pool_of(first, Away("http://b", ModelMetadata("m", local_experts=frozenset({1}), **told)))
    routing = np.array([[0], [1]], np.int32), np.ones((2, 1), np.float32)
    run(pool.infer(layer_call("m", X, *routing), Deadline(10)))
    assert sizes == [2, 1]


def tells(peer: Peer, request: Request) -> bool:
    """Answer what is asked of a server beside calls; False: it is a call."""
    if request.line.startswith("POST"):
        return False
    entries = [("hidden_states", 4), ("topk_ids", 2)]
    inputs = [{"name": name, "shape": [-1, size], "datatype": "FP32"} for name, size in entries]
    model = {"name": "m", "inputs": inputs, "parameters": {"num_experts": 8, "weights_id": "w"}}
    peer.send(answer(200, json.dumps(model if "models" in request.line else {}).encode()))
    return True


def echoes(peer: Peer) -> None:
    while True:
        request = peer.request()
        if not tells(peer, request):
            peer.send(echo(request))


def lines(server: FakeServer, part: str) -> int:
    return sum(part in request.line for request in server.requests)


@pytest.mark.usefixtures("in_order")
def test_a_call_goes_to_a_server_that_hangs_once() -> None:
    """Though its connection, kept from a question before, is lost without an answer."""

    def hangs(peer: Peer) -> None:
        while True:
            request = peer.request()
            if lines(first, "/infer"):
                peer.request()  # none comes
            tells(peer, request)

    with fake_server(hangs) as first, fake_server(echoes) as second:
        urls = [first.url, second.url]
        with ExpertClient(urls, transport="http", failover_seconds=0.2) as client:
            np.testing.assert_array_equal(client.infer("m", X), X)
        assert [lines(server, "/infer") for server in (first, second)] == [1, 1]


@pytest.mark.usefixtures("in_order")
def test_callers_of_a_long_step_do_not_ask_often_whether_the_server_lives() -> None:
    """And do not leave it. At most each quarter of `failover_seconds`."""
    asked: list[float] = []

    def is_slow(peer: Peer) -> None:
        while True:
            request = peer.request()
            if "/live" in request.line:
                asked.append(time.monotonic())
            if not tells(peer, request):
                wait_for(lambda: len(asked) >= 4, "it is asked whether it lives")
                peer.send(echo(request))

    with fake_server(is_slow) as first, fake_server(echoes) as second:
        urls = [first.url, second.url]
        with ExpertClient(urls, transport="http", failover_seconds=0.8) as client:
            np.testing.assert_array_equal(client.infer("m", X), X)
        assert [lines(server, "/infer") for server in (first, second)] == [1, 0]
    assert asked[3] - asked[0] > 2 * 0.2  # three, but for the way of the first


def test_a_server_that_is_back_says_what_it_has() -> None:
    """Also where nothing but open channels calls, which may have to leave another server for it."""
    servers: dict[str, Any] = {url: Server(url) for url in ("http://a", "http://b")}
    pool = ServerPool(Fixed(list(servers)), servers.__getitem__, 0.2)
    infer(pool)
    first, second = pool.members
    pool.mark(second, "down")
    Watch(pool, servers.__getitem__).wake()
    try:
        wait_for(lambda: pool.can_do_without(first), "the second has said what it has")
    finally:
        run(pool.close())


@pytest.mark.slow
def test_a_list_that_takes_long_holds_nothing_up() -> None:
    asked, goes_on = threading.Event(), threading.Event()

    class Slow:
        def urls(self) -> list[str]:
            if threading.current_thread() is not threading.main_thread():
                asked.set()
                goes_on.wait()
            return ["http://a"]

    servers: dict[str, Any] = {"http://a": Server("http://a")}
    pool = ServerPool(Slow(), servers.__getitem__, 0.05)
    (member,) = pool.members
    Watch(pool, servers.__getitem__).wake()
    try:
        assert asked.wait(60)
        pool.mark(member, "down")
        wait_for(lambda: member.state == "up", "the server is asked")
    finally:
        goes_on.set()
        run(pool.close())


@pytest.mark.slow
def test_a_pool_that_is_dropped_is_looked_after_no_longer() -> None:
    """While its servers, which hang, are asked."""
    before = set(threading.enumerate())
    with ExitStack() as stack:
        ports = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(4)
        ]
        client = ExpertClient([f"http://127.0.0.1:{port}" for port in ports], failover_seconds=0.5)
        with pytest.raises(ServerUnreachableError):
            client.infer("m", X)
        del client
        gc.collect()
        wait_for(lambda: set(threading.enumerate()) <= before, "its threads end")


@pytest.mark.slow
def test_a_pool_is_looked_after_when_the_main_thread_has_ended(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text("http://127.0.0.1:9")
    program = f"""
import threading, time
from pathlib import Path
from expertd_client import ExpertClient

def work():
    threading.main_thread().join()
    Path({str(file)!r}).write_text("http://localhost:9")
    end = time.monotonic() + 50
    while client.servers()[0].url != "http://localhost:9" and time.monotonic() < end:
        time.sleep(0.01)
    print(client.servers()[0].url)

client = ExpertClient("file:{file}")
client.ready()
threading.Thread(target=work).start()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "http://localhost:9\n"
    assert "Traceback" not in done.stderr
