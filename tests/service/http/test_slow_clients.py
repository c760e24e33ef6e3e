"""Clients that trickle, or leave before, during and after their step: how long they hold memory."""

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import pytest

from expertd.service.http.connection import HttpConnection
from expertd.service.http.sender import Sender
from tests.service.apps import (
    HIDDEN,
    Serving,
    hidden_request,
    limits_for,
    on_uvloop,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.runners import EchoRunner
from tests.service.sockets import INFER, connect, head, infer, read_answer, read_to_end
from tests.service.virtual_time import in_virtual_time
from tests.service.waiting import until

TOKENS = 32768  # whose output no socket's buffers hold
PERIOD = 0.05


class Pipe:
    """A transport that has taken what `unsent` does not count."""

    def __init__(self) -> None:
        self.unsent = 0

    def set_write_buffer_limits(self, high: int) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return self.unsent


class Sending:
    """A sender that wants 100 bytes to be read in each period."""

    def __init__(self) -> None:
        self.pipe = Pipe()
        self.stalled = asyncio.Event()
        loop = asyncio.get_running_loop()
        self.sender = Sender(self.pipe, loop, PERIOD, 100, lambda: None, self.stalled.set)  # type: ignore[arg-type]

    async def stalls_within(self, periods: int) -> bool:
        try:
            await asyncio.wait_for(self.stalled.wait(), periods * PERIOD)
        except TimeoutError:
            return False
        return True


@in_virtual_time
async def test_a_client_that_reads_too_little_in_a_period_stalls() -> None:
    this = Sending()
    this.pipe.unsent = 1000
    this.sender.pause()
    await asyncio.sleep(0)
    this.pipe.unsent = 901
    assert await this.stalls_within(100)


@in_virtual_time
async def test_a_client_that_reads_enough_in_each_period_does_not_stall() -> None:
    this = Sending()
    this.pipe.unsent = 100_000

    def read() -> None:
        this.pipe.unsent -= 1000
        reading.append(loop.call_later(PERIOD / 10, read))

    loop = asyncio.get_running_loop()
    reading: list[asyncio.TimerHandle] = []
    this.sender.pause()
    loop.call_soon(read)
    assert not await this.stalls_within(5)
    reading[-1].cancel()
    assert await this.stalls_within(100), "nor does it read the rest"


@in_virtual_time
async def test_what_is_written_after_the_pause_is_not_taken_for_a_stall() -> None:
    this = Sending()
    this.pipe.unsent = 10
    this.sender.pause()
    this.pipe.unsent = 5000
    await asyncio.sleep(0)
    this.pipe.unsent = 4800
    assert not await this.stalls_within(1)


@in_virtual_time
async def test_the_rest_of_an_answer_may_be_less_than_the_least() -> None:
    this = Sending()
    this.pipe.unsent = 50
    this.sender.pause()
    await asyncio.sleep(0)
    this.sender.resume()
    assert not await this.stalls_within(3)


class Trickle(threading.Thread):
    """Reads or sends a few bytes, again and again, until `stop` or the end of the connection."""

    def __init__(self, step: Callable[[], object]) -> None:
        super().__init__()
        self._step = step
        self._stopped = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            while not self._stopped.wait(0.02):
                self._step()
        except OSError:
            pass

    def stop(self) -> None:
        self._stopped.set()
        self.join()


@asynccontextmanager
async def slowly_read(**limits: float) -> AsyncIterator[Serving]:
    settings = tiny_settings({**limits_for(TOKENS), **limits}, keep_alive_seconds=1)
    async with serving(settings, serving_runner(EchoRunner()), send_buffer=8192) as server:
        yield server


def request() -> bytes:
    return infer(*hidden_request(np.ones((TOKENS, HIDDEN), np.float32)))


@pytest.mark.slow
@on_uvloop
async def test_a_trickle_of_reads_does_not_hold_an_answer() -> None:
    data = request()  # before the connection idles
    async with slowly_read() as server:
        with connect(server.port, receive_buffer=4096) as sock:
            await asyncio.to_thread(sock.sendall, data)
            await until(lambda: server.arena.used_bytes > 0)
            reader = Trickle(lambda: sock.recv(1000))
            try:
                await until(lambda: server.counted(499) == 1)
                assert server.arena.used_bytes == 0
            finally:
                reader.stop()


@pytest.mark.slow
@on_uvloop
async def test_a_trickle_of_sent_bytes_does_not_hold_a_body() -> None:
    data = request()[:-100_000]
    async with slowly_read(body_timeout_seconds=1) as server:
        with connect(server.port) as sock:
            await asyncio.to_thread(sock.sendall, data)
            await until(lambda: server.arena.used_bytes > 0)
            sender = Trickle(lambda: sock.send(b"x"))
            answer = await asyncio.to_thread(read_answer, sock)
            sender.stop()
        assert answer.error == "body: expected the whole body within 1 s, got a part of it"
        assert (answer.status, server.arena.used_bytes, server.counted(408)) == (408, 0, 1)


@on_uvloop
async def test_a_refusal_that_waits_for_its_client_is_the_only_answer() -> None:
    chunk = bytes(5120)
    wrong = head(f"POST {INFER} HTTP/1.1", "Transfer-Encoding: chunked")
    wrong += b"%x\r\n%s\r\n0\r\n\r\n" % (len(chunk), chunk)
    settings = tiny_settings({"max_json_bytes": 4096, "body_timeout_seconds": 0.3})
    connections: set[HttpConnection] = set()
    async with serving(
        settings, serving_runner(EchoRunner()), connections=connections, send_buffer=1
    ) as server:
        with connect(server.port, receive_buffer=1) as sock:
            sock.setblocking(False)
            sent = 0
            while not any(connection._sender.holds_bytes for connection in connections):
                await asyncio.get_running_loop().sock_sendall(sock, wrong)
                sent += 1
                await asyncio.sleep(0.003)
            await asyncio.sleep(0.6)
            sock.settimeout(60)
            sock.sendall(head("GET /v2/health/live HTTP/1.1", "Connection: close"))
            received = await asyncio.to_thread(read_to_end, sock)
            assert [answer.status for answer in received] == [413] * sent + [200]
            assert server.counted(408) == 0


REQUEST = infer(*hidden_request(rows(1)))
LAST = infer(*hidden_request(rows(1)), "Connection: close")
TEN = infer(*hidden_request(rows(1)), "X: 1").replace(b"HTTP/1.1", b"HTTP/1.0", 1)
Leave = Callable[[socket.socket], None]


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


LEAVE = pytest.mark.parametrize("leave", [socket.socket.close, reset, half_close])
REQUESTS = pytest.mark.parametrize("data", [REQUEST, LAST, TEN], ids=["keep-alive", "close", "1.0"])


@asynccontextmanager
async def held() -> AsyncIterator[tuple[Serving, EchoRunner]]:
    """A server whose steps wait."""
    runner = EchoRunner()
    async with serving(tiny_settings(), serving_runner(runner)) as server:
        runner.gate.clear()
        try:
            yield server, runner
        finally:
            runner.gate.set()


@LEAVE
@REQUESTS
@on_uvloop
async def test_a_request_in_the_queue_is_dropped_as_soon_as_its_client_leaves(
    leave: Leave, data: bytes
) -> None:
    async with held() as (server, runner):
        with connect(server.port) as first, connect(server.port) as sock:
            first.sendall(REQUEST)
            await runner.begun()
            sock.sendall(data)
            await until(lambda: server.metric("queue_requests", model="tiny") == 1)
            leave(sock)
            for _ in range(2):  # the event loop finds it in its first iteration, and closes in the next
                await asyncio.sleep(0)
            assert server.metric("queue_requests", model="tiny") == 0
            assert server.counted(499) == 1
            runner.gate.set()
            await until(lambda: server.counted(200) == 1)
    assert runner.steps == [[1]]


@LEAVE
@REQUESTS
@on_uvloop
async def test_a_disconnect_during_the_step_counts_as_499(leave: Leave, data: bytes) -> None:
    async with held() as (server, runner):
        with connect(server.port) as sock:
            sock.sendall(data)
            await runner.begun()
            leave(sock)
            runner.gate.set()
            await until(lambda: server.counted(499) + server.counted(200) == 1)
        assert server.counted(499) == 1
        assert server.metric("refusals_total", model="tiny", reason="client_gone") == 1


@LEAVE
@on_uvloop
async def test_a_disconnect_counts_every_pipelined_request(leave: Leave) -> None:
    async with held() as (server, runner):
        with connect(server.port) as sock:
            sock.sendall(5 * REQUEST)
            await runner.begun()
            leave(sock)
            await until(lambda: server.counted(499) == 4)
            runner.gate.set()
            await until(lambda: server.counted(499) + server.counted(200) == 5)
        assert server.counted(499) == 5


@on_uvloop
async def test_a_drain_answers_pipelined_requests_too() -> None:
    async with held() as (server, runner):
        with connect(server.port) as sock:
            sock.sendall(3 * REQUEST)
            await runner.begun()
            server.app.engine.begin_drain()
            runner.gate.set()
            got = await asyncio.to_thread(read_to_end, sock)
        assert [answer.status for answer in got] == [200] * 3
        assert [answer.headers.get("connection") for answer in got] == [None, None, "close"]
