"""Clients that stop reading or disconnect before, during and after their step."""

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from tests.service.apps import Serving, hidden_request, rows, serving, serving_runner, tiny_settings
from tests.service.runners import EchoRunner
from tests.service.sockets import connect, infer, read_to_end
from tests.service.waiting import until

REQUEST = infer(*hidden_request(rows(1)))
LAST = infer(*hidden_request(rows(1)), "Connection: close")
TEN = infer(*hidden_request(rows(1)), "X: 1").replace(b"HTTP/1.1", b"HTTP/1.0", 1)


class Held:
    """A server in this process whose steps wait for `runner.gate`, and its port."""

    def __init__(self, server: Serving, runner: EchoRunner, port: int) -> None:
        self.server, self.runner, self.port = server, runner, port

    def counted(self, status: int) -> float:
        return self.server.metric("requests_total", model="tiny", status=str(status))

    async def in_step(self) -> None:
        assert await asyncio.to_thread(self.runner.entered.acquire, True, 10)

    async def waiting(self, number: int) -> None:
        await until(lambda: self.server.metric("queue_requests", model="tiny") == number)


def held(check: Callable[[Held], Coroutine[Any, Any, None]], settings: dict[str, Any] | None = None) -> None:
    """Run `check` on uvloop, like the server itself, with a server whose gate is closed."""

    async def run() -> None:
        runner = EchoRunner()
        async with serving(tiny_settings(**(settings or {})), serving_runner(runner)) as server:
            runner.gate.clear()
            try:
                await check(Held(server, runner, server.port))
            finally:
                runner.gate.set()

    uvloop.run(run())


Leave = Callable[[socket.socket], None]


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


LEAVE = [socket.socket.close, reset, half_close]


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("request_bytes", [REQUEST, LAST, TEN], ids=["keep-alive", "close", "1.0"])
def test_a_request_in_the_queue_is_dropped_as_soon_as_its_client_leaves(
    leave: Leave, request_bytes: bytes
) -> None:
    async def check(this: Held) -> None:
        with connect(this.port) as first, connect(this.port) as sock:
            first.sendall(REQUEST)
            await this.in_step()
            sock.sendall(request_bytes)
            await this.waiting(1)
            leave(sock)
            for _ in range(2):  # the event loop finds it in its first iteration, and closes in the next
                await asyncio.sleep(0)
            assert this.server.metric("queue_requests", model="tiny") == 0
            assert this.counted(499) == 1
            this.runner.gate.set()
            await until(lambda: this.counted(200) == 1)
        assert this.runner.steps == [[1]]

    held(check)


@pytest.mark.parametrize("leave", LEAVE)
@pytest.mark.parametrize("request_bytes", [REQUEST, LAST, TEN], ids=["keep-alive", "close", "1.0"])
def test_a_disconnect_during_the_step_counts_as_499(leave: Leave, request_bytes: bytes) -> None:
    async def check(this: Held) -> None:
        with connect(this.port) as sock:
            sock.sendall(request_bytes)
            await this.in_step()
            leave(sock)
            this.runner.gate.set()
            await until(lambda: this.counted(499) + this.counted(200) == 1)
        assert this.counted(499) == 1
        assert this.server.metric("refusals_total", model="tiny", reason="client_gone") == 1

    held(check)


@pytest.mark.parametrize("leave", LEAVE)
def test_a_disconnect_counts_every_pipelined_request(leave: Leave) -> None:
    async def check(this: Held) -> None:
        with connect(this.port) as sock:
            sock.sendall(5 * REQUEST)
            await this.in_step()
            leave(sock)
            await until(lambda: this.counted(499) == 4)
            this.runner.gate.set()
            await until(lambda: this.counted(499) + this.counted(200) == 5)
        assert this.counted(499) == 5

    held(check)


def test_a_drain_answers_pipelined_requests_too() -> None:
    async def check(this: Held) -> None:
        with connect(this.port) as sock:
            sock.sendall(3 * REQUEST)
            await this.in_step()
            this.server.app.engine.begin_drain()
            this.runner.gate.set()
            got = await asyncio.to_thread(read_to_end, sock)
        assert [answer.status for answer in got] == [200] * 3
        assert [answer.headers.get("connection") for answer in got] == [None, None, "close"]

    held(check)
