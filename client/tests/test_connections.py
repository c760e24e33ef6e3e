"""Connections: kept, found stale, broken at every point, forked, and the answers that come early or late."""

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from expertd_client import (
    AsyncExpertClient,
    ExpertClient,
    InvalidRequestError,
    ServerUnreachableError,
)
from tests.callers import Connect
from tests.expertd import RunningServer
from tests.fakes import Peer, echo, echoing, fake_server, output, refusal
from tests.programs import run, running

X = np.arange(6, dtype=np.float32).reshape(2, 3)
LARGE = np.zeros((4096, 2048), np.float32)  # 32 MiB: more than any socket buffer


def test_one_connection_is_kept_for_calls_one_after_another(connect: Connect) -> None:
    with fake_server(echoing) as server:
        client = connect(server.url)
        for _ in range(3):
            np.testing.assert_array_equal(client.infer("m", X), X)
        client.close()
    assert (server.num_connections, len(server.requests)) == (1, 3)


def test_connection_close_is_honoured(connect: Connect) -> None:
    def handle(peer: Peer) -> None:
        request = peer.request()
        peer.send(output([2, 3], "FP32", request.tensors, "Connection: close"))

    with fake_server(handle) as server:
        client = connect(server.url)
        client.infer("m", X)
        client.infer("m", X)
    assert server.num_connections == 2


def test_a_request_that_a_stale_connection_swallowed_is_sent_again(connect: Connect) -> None:
    def handle(peer: Peer) -> None:
        peer.send(echo(peer.request()))
        request = peer.request()
        if peer.number:
            peer.send(echo(request))

    with fake_server(handle) as server:
        client = connect(server.url)
        client.infer("m", X)
        np.testing.assert_array_equal(client.infer("m", 2 * X), 2 * X)  # on a new connection
        client.close()
    assert (server.num_connections, len(server.requests)) == (2, 3)


def test_a_connection_that_was_closed_while_idle_is_not_used(connect: Connect) -> None:
    closed = threading.Event()

    def handle(peer: Peer) -> None:
        peer.send(echo(peer.request()))
        peer.close()
        closed.set()

    with fake_server(handle) as server:
        client = connect(server.url)
        client.infer("m", X)
        assert closed.wait(60)
        client.infer("m", X)
    assert (server.num_connections, len(server.requests)) == (2, 2)


def test_a_request_is_not_sent_again_once_a_part_of_its_answer_came(connect: Connect) -> None:
    def handle(peer: Peer) -> None:
        peer.send(echo(peer.request()))
        peer.send(echo(peer.request())[:10])

    with fake_server(handle) as server:
        client = connect(server.url)
        client.infer("m", X)
        with pytest.raises(ServerUnreachableError):
            client.infer("m", X)
    assert len(server.requests) == 2


@pytest.mark.parametrize("sent", [0, 1, 40, -100, -10])
def test_a_cut_answer_is_an_error_and_not_asked_for_again(connect: Connect, sent: int) -> None:
    def handle(peer: Peer) -> None:
        peer.request()
        peer.send(output([2, 3], "FP32", X.tobytes())[:sent])

    with fake_server(handle) as server:
        client = connect(server.url)
        with pytest.raises(ServerUnreachableError, match=r"^connection to http://127.* expected .*before it"):
            client.infer("m", X)
    assert len(server.requests) == 1


def test_no_server(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    client = connect(f"http://127.0.0.1:{port}")
    with pytest.raises(ServerUnreachableError, match=r"^server http://.*: expected a connection, got .*111"):
        client.infer("m", X)
    assert not client.live()
    assert not client.ready()
    with pytest.raises(ServerUnreachableError, match="expected a connection"):
        connect("http://no-such-host.invalid:1").infer("m", X)


def test_unix_sockets(connect: Connect, tmp_path: Path) -> None:
    with fake_server(echoing, tmp_path / "socket") as server:
        client = connect(server.url)
        np.testing.assert_array_equal(client.infer("m", X), X)
        client.close()
    assert server.requests[0].headers["host"] == "localhost"
    with pytest.raises(ServerUnreachableError, match=r"^server unix:/.*: expected a connection"):
        connect(f"unix:{tmp_path}/other").infer("m", X)


@pytest.mark.parametrize("closes", [False, True], ids=["stays open", "closes"])
def test_a_refusal_that_comes_before_the_body_is_read(connect: Connect, closes: bool) -> None:
    done = threading.Event()

    def handle(peer: Peer) -> None:
        peer.head()
        peer.send(refusal(413, "body: expected less, got more"))
        assert closes or done.wait(60)

    with fake_server(handle) as server:
        client = connect(server.url)
        try:
            with pytest.raises(InvalidRequestError, match=r"^body: expected less, got more$") as caught:
                client.infer("m", LARGE.reshape(1, -1))  # several tokens would be sent in parts
        finally:
            done.set()
        assert caught.value.status == 413


def test_interim_answers_are_skipped(connect: Connect) -> None:
    def handle(peer: Peer) -> None:
        _, headers = peer.head()
        peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")  # while the body is still being sent
        peer.skip(int(headers["content-length"]))
        peer.send(b"HTTP/1.1 102 Processing\r\nX: y\r\n\r\n" + output([4096, 2048], "FP32", LARGE.tobytes()))

    with fake_server(handle) as server:
        np.testing.assert_array_equal(connect(server.url).infer("m", LARGE), LARGE)


async def test_at_most_max_connections_are_open_in_an_event_loop() -> None:
    with fake_server(echoing) as server:
        async with AsyncExpertClient(server.url, max_connections=2, transport="http") as client:
            results = await asyncio.gather(*(client.infer("m", X + number) for number in range(40)))
        for number, result in enumerate(results):
            np.testing.assert_array_equal(result, X + number)
    assert server.num_connections == 2


async def test_cancelling_the_task_closes_the_connection() -> None:
    left: list[bool] = []
    began = threading.Event()

    def handle(peer: Peer) -> None:
        peer.request()
        began.set()
        left.append(peer.is_closed_by_client())

    with fake_server(handle) as server:
        async with AsyncExpertClient(server.url, transport="http") as client:
            task = asyncio.create_task(client.infer("m", X))
            assert await asyncio.to_thread(began.wait, 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert left == [True]


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """KeyboardInterrupt on SIGINT, which a shell's background processes ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_closes_the_connection(default_sigint: None) -> None:
    left: list[bool] = []
    main = threading.get_ident()

    def handle(peer: Peer) -> None:
        peer.request()
        # To the thread that waits: another one would leave its system call uninterrupted.
        signal.pthread_kill(main, signal.SIGINT)
        left.append(peer.is_closed_by_client())

    with (
        fake_server(handle) as server,
        ExpertClient(server.url, transport="http") as client,
        pytest.raises(KeyboardInterrupt),
    ):
        client.infer("m", X)
    assert left == [True]


@pytest.mark.slow
def test_a_forked_process_uses_connections_of_its_own(server: RunningServer) -> None:
    program = """
import os, sys, threading, numpy as np
from expertd_client import ExpertClient
x = np.ones((64, 512), np.float32)
client = ExpertClient(sys.argv[1], transport="http")
expected = client.infer("demo", x)
child = os.fork()
for number in range(50):
    if (client.infer("demo", x) != expected).any():
        os._exit(1)
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os._exit(0)
"""
    run(program, server.url)


HELD = """
import asyncio, os, sys, threading, time
import numpy as np
from expertd_client import AsyncExpertClient, DeadlineError, ExpertClient

x = np.ones((1, 8), np.float32)

async def awaiting():
    await AsyncExpertClient(sys.argv[1], transport="http").infer("m", x, timeout=2)

def calling():
    try:
        if sys.argv[2] == "loop":
            asyncio.run(awaiting())
        ExpertClient(sys.argv[1], transport="http").infer("m", x, timeout=2)
    except DeadlineError:
        print("late", flush=True)

thread = threading.Thread(target=calling)
thread.start()
sys.stdin.readline()
if not os.fork():
    print("forked", flush=True)
    time.sleep(60)
    os._exit(0)
thread.join()
"""


@pytest.mark.parametrize("scheme", ["http", "https"])  # in a call, and in the handshake
@pytest.mark.parametrize("waits_in", ["thread", "loop"])
def test_a_fork_during_a_call_does_not_keep_its_connection_open(scheme: str, waits_in: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        url = f"{scheme}://127.0.0.1:{server.getsockname()[1]}"
        with running(HELD, url, waits_in) as parent:
            connection, _ = server.accept()
            with connection:
                assert connection.recv(1 << 16)
                parent.tell("fork")
                assert parent.says("forked")
                assert parent.says("late")
                connection.settimeout(60)
                while connection.recv(1 << 16):
                    pass  # the end, which tells the server that nobody waits


FORK = """
import os, sys, threading, time
from expertd_client.channel.claiming import claim
from expertd_client.channel.layout import VERSION
from expertd_client.deadline import Deadline
from expertd_client.errors import DeadlineError

geometry = {"num_slots": 1, "control_bytes": 4096, "data_bytes": 4096}
opened = {"version": VERSION, "socket": sys.argv[1], "token": "00" * 16, "geometry": geometry}

def claiming():
    try:
        claim(opened, Deadline(2))
    except DeadlineError:
        print("late", flush=True)

thread = threading.Thread(target=claiming)
thread.start()
sys.stdin.readline()
if not os.fork():
    time.sleep(60)
    os._exit(0)
thread.join()
"""


def test_a_fork_during_a_claim_does_not_keep_the_connection_open(tmp_path: Path) -> None:
    path = tmp_path / "channels"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        server.settimeout(60)
        with running(FORK, str(path)) as parent:
            connection, _ = server.accept()
            with connection:
                assert len(connection.recv(16)) == 16
                parent.tell("fork")
                assert parent.says("late")
                connection.settimeout(60)
                assert connection.recv(1) == b"", "the server sees that the claim has ended"
