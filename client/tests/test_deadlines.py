"""Timeouts: what they bound, and what the server hears of them."""

import asyncio
import math
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from expertd_client import DeadlineError, ExpertClient, InvalidRequestError
from expertd_client.address import parse_address
from expertd_client.deadline import Deadline
from expertd_client.http import waits
from expertd_client.http.connection import Connection
from tests.callers import Connect
from tests.fakes import Peer, echo, echoing, fake_server

X = np.arange(6, dtype=np.float32).reshape(2, 3)
LARGE = np.zeros((4096, 2048), np.float32)  # 32 MiB: more than any socket buffer


@pytest.mark.parametrize("sent", [0, 30, -100, -10])
def test_the_timeout_bounds_waiting_for_an_answer(connect: Connect, sent: int) -> None:
    left: list[bool] = []

    def handle(peer: Peer) -> None:
        answer = echo(peer.request())
        try:
            peer.send(answer[:sent])
        except ConnectionError:  # it has left before
            left.append(True)
        else:
            left.append(peer.is_closed_by_client())

    with fake_server(handle) as server:
        client = connect(server.url)
        began = time.monotonic()
        with pytest.raises(DeadlineError, match=r"^timeout: expected the whole answer within 0\.5 s"):
            client.infer("m", X, timeout=0.5)
        assert time.monotonic() - began >= 0.5
    assert left == [True]  # so that the server can drop the request
    assert len(server.requests) == 1


def test_the_timeout_bounds_connecting_to_all_addresses(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        place = full.getsockname()
        for _ in range(2):  # whom nobody accepts: the next ones get no answer
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(place)
        info = (socket.AF_INET, socket.SOCK_STREAM, 6, "", place)
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [info] * 2000)
        client = connect(f"http://many:{place[1]}")
        with pytest.raises(DeadlineError):
            client.infer("m", X, timeout=0.5)


def test_the_timeout_bounds_sending(connect: Connect) -> None:
    done = threading.Event()

    def handle(peer: Peer) -> None:
        assert done.wait(60)

    with fake_server(handle) as server:
        client = connect(server.url)
        with pytest.raises(DeadlineError):
            client.infer("m", LARGE, timeout=0.2)
        done.set()


def test_the_timeout_of_the_client_is_the_default(connect: Connect) -> None:
    def handle(peer: Peer) -> None:
        peer.request()
        peer.is_closed_by_client()

    with fake_server(handle) as server:
        client = connect(server.url, timeout=0.2)
        with pytest.raises(TimeoutError):
            client.infer("m", X)
        assert not client.ready()


@pytest.mark.parametrize("timeout", [5.0, 60.0, math.inf])
def test_the_timeout_travels_in_microseconds(connect: Connect, timeout: float) -> None:
    with fake_server(echoing) as server:
        client = connect(server.url)
        client.infer("m", X, timeout=timeout)
        client.close()
    sent = server.requests[0].json["parameters"].get("timeout")
    if math.isinf(timeout):
        assert sent is None
    else:
        assert 0 < sent <= timeout * 1e6
        assert sent > timeout * 1e6 / 2


@pytest.mark.parametrize("timeout", [0, -1, math.nan, "1", b""])
def test_timeouts_that_cannot_be_met(connect: Connect, timeout: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^timeout: expected a positive number of seconds, got"):
        connect("http://127.0.0.1:1", timeout=timeout)
    with pytest.raises(InvalidRequestError, match=r"^timeout: expected a positive number of seconds, got"):
        connect("http://127.0.0.1:1").infer("m", X, timeout=timeout)


def test_waiting_for_a_turn_counts() -> None:
    done = threading.Event()
    began = threading.Event()

    def handle(peer: Peer) -> None:
        request = peer.request()
        began.set()
        assert done.wait(60)
        peer.send(echo(request))

    with (
        fake_server(handle) as server,
        ExpertClient(server.url, max_connections=1, transport="http") as client,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(client.infer, "m", X)
        assert began.wait(60)
        with pytest.raises(DeadlineError):
            client.infer("m", X, timeout=0.1)
        done.set()
        np.testing.assert_array_equal(first.result(), X)
    assert len(server.requests) == 1


@pytest.mark.parametrize("timeout", [1e10, 1e14, float(2**63)])
def test_a_timeout_of_centuries_is_none(connect: Connect, timeout: float) -> None:
    deadline = Deadline(timeout)
    assert deadline.microseconds() is None
    assert deadline.check() == math.inf
    with fake_server(lambda peer: peer.send(echo(peer.request()))) as server:
        np.testing.assert_array_equal(connect(server.url).infer("m", X, timeout=timeout), X)


async def test_a_cancellation_at_the_moment_of_a_connection_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Connection] = []
    connected = waits._connected

    async def cancelling(*arguments: Any) -> Connection:
        made.append(await connected(*arguments))
        calling.cancel()
        return made[-1]

    monkeypatch.setattr(waits, "_connected", cancelling)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = parse_address(f"http://127.0.0.1:{server.getsockname()[1]}")
        calling = asyncio.ensure_future(waits.Connect(address, Deadline(30)).in_loop())
        with pytest.raises(asyncio.CancelledError):
            await calling
        await asyncio.sleep(0)
        assert [connection.sock.fileno() for connection in made] == [-1]
