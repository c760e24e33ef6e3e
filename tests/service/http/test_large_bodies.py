"""Large bodies and outputs lie in the arena, are bounded by it, and are given back whatever happens."""

import asyncio
import gzip
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest

from expertd.service.http.connection import ConnectionState, HttpConnection
from expertd.service.memory import Span
from expertd.service.moe.request import LayerRequest, StepResult
from tests.service.apps import (
    HIDDEN,
    Serving,
    hidden_request,
    limits_for,
    on_uvloop,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.runners import EchoRunner, Turnstile
from tests.service.sockets import INFER, Answer, answers, connect, head, infer, read_answer, read_to_end
from tests.service.waiting import until

TOKENS = 2048
SIZE = TOKENS * HIDDEN * 4
LIMITS = {**limits_for(TOKENS), "max_buffered_bytes": 9 * SIZE}
# Of an answer that no socket's buffers hold.
HUGE_TOKENS = 32768
HUGE = HUGE_TOKENS * HIDDEN * 4
HUGE_LIMITS = {
    **limits_for(HUGE_TOKENS),
    "max_body_bytes": HUGE + 65536,
    "max_buffered_bytes": 4 * HUGE + (1 << 20),
}


class Recording(EchoRunner):
    """Lists the requests of all steps."""

    def __init__(self) -> None:
        super().__init__(poison=666.0)
        self.requests: list[LayerRequest] = []

    def _run(self, requests: Sequence[LayerRequest]) -> StepResult:
        self.requests.extend(requests)
        return super()._run(requests)


@asynccontextmanager
async def large(
    limits: dict[str, float] = LIMITS, connections: set[HttpConnection] | None = None
) -> AsyncIterator[tuple[Serving, Recording]]:
    """A server for large requests; afterwards all memory must be free."""
    runner = Recording()
    async with serving(tiny_settings(limits), serving_runner(runner), connections=connections) as server:
        try:
            yield server, runner
        finally:
            runner.gate.set()
        await until(lambda: server.arena.used_bytes == 0)


async def ask(server: Serving, data: bytes) -> Answer:
    with connect(server.port) as sock:
        await asyncio.to_thread(sock.sendall, data)
        return await asyncio.to_thread(read_answer, sock)


def body(value: float, tokens: int = TOKENS) -> tuple[bytes, int]:
    return hidden_request(np.full((tokens, HIDDEN), value, np.float32))


def values(answer: Answer, size: int = SIZE) -> set[float]:
    assert answer.status == 200, answer.body
    data = answer.body[int(answer.headers["inference-header-content-length"]) :]
    assert len(data) == size
    return set(np.frombuffer(data, np.float32).tolist())


def chunked(data: bytes, length: int, size: int = 30_000) -> bytes:
    pieces = [data[begin : begin + size] for begin in range(0, len(data), size)]
    coded = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    length_header = f"Inference-Header-Content-Length: {length}"
    return head(f"POST {INFER} HTTP/1.1", "Transfer-Encoding: chunked", length_header) + coded


def request(kind: str, value: float) -> bytes:
    data, length = body(value)
    if kind == "chunked":
        return chunked(data, length)
    if kind == "compressed":
        return infer(gzip.compress(data, 1), length, "Content-Encoding: gzip")
    return infer(data, length)


@on_uvloop
async def test_memory_comes_back_after_large_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertd.service.engine.idle_memory.PERIOD_SECONDS", 0.05)
    async with large() as (server, _):
        assert values(await ask(server, request("plain", 1.0))) == {1.0}
        await until(lambda: os.fstat(server.arena.fd).st_blocks == 0)
        assert values(await ask(server, request("plain", 2.0))) == {2.0}


@pytest.mark.parametrize("kind", ["plain", "chunked", "compressed"])
@on_uvloop
async def test_the_layer_reads_and_writes_in_place(kind: str) -> None:
    async with large() as (server, runner):
        for value in (1.0, 2.0):
            assert values(await ask(server, request(kind, value))) == {value}
        for received in runner.requests:
            assert isinstance(received.hidden_states, Span)
            assert received.hidden_states.address % 256 == 0
            assert isinstance(received.output, Span)
            assert received.output.num_bytes == SIZE


@on_uvloop
async def test_requests_in_the_bytes_behind_a_large_body_are_answered() -> None:
    data = request("plain", 1.0) + request("chunked", 2.0) + head("GET /v2 HTTP/1.1", "Connection: close")
    async with large() as (server, _):
        with connect(server.port) as sock:
            sending = asyncio.ensure_future(asyncio.to_thread(sock.sendall, data))
            received = b""
            while piece := await asyncio.to_thread(sock.recv, 1 << 20):
                received += piece
            await sending
        first, second, third = answers(received)
        assert (values(first), values(second), third.status) == ({1.0}, {2.0}, 200)


@pytest.mark.slow
@on_uvloop
async def test_the_bodys_memory_is_free_once_the_step_is_done() -> None:
    async with large(HUGE_LIMITS) as (server, runner):
        with connect(server.port, receive_buffer=4096) as sock:
            await asyncio.to_thread(sock.sendall, infer(*body(1.0, HUGE_TOKENS)))
            await runner.begun()
            await until(lambda: server.arena.used_bytes == HUGE)
            # Others use the memory of the body again, but not that of the answer.
            for value in (2.0, 3.0):
                assert values(await ask(server, infer(*body(value, HUGE_TOKENS))), HUGE) == {value}
            await until(lambda: server.arena.used_bytes == HUGE)
            assert server.counted(200) == 2, "an answer that is not sent does not count"
            assert values(await asyncio.to_thread(read_answer, sock), HUGE) == {1.0}
        await until(lambda: server.counted(200) == 3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "chunked"])
@pytest.mark.parametrize("when", ["in the body", "in the queue", "in the step"])
@on_uvloop
async def test_a_client_that_leaves_holds_nothing(when: str, kind: str) -> None:
    async with large() as (server, runner):
        data = request(kind, 1.0)
        runner.gate = gate = Turnstile()
        with connect(server.port) as first, connect(server.port) as sock:
            first.sendall(infer(*body(1.0, tokens=1)))
            await runner.begun()
            await asyncio.to_thread(sock.sendall, data[:-100_000] if when == "in the body" else data)
            if when == "in the body":
                await until(lambda: server.arena.used_bytes > 0)
            else:
                await until(lambda: server.metric("queue_requests", model="tiny") == 1)
            if when == "in the step":
                gate.let_one_through()
                await runner.begun()
            sock.close()
            await until(lambda: when == "in the step" or server.counted(499) == 1)
            assert (server.arena.used_bytes > 0) == (when == "in the step"), "a step still uses it"
            gate.set()
            await until(lambda: server.counted(499) == 1)
            await until(lambda: server.arena.used_bytes == 0)


@on_uvloop
async def test_a_client_that_leaves_while_its_answer_is_sent_holds_nothing() -> None:
    async with large(HUGE_LIMITS) as (server, runner):
        with connect(server.port, receive_buffer=4096) as sock:
            await asyncio.to_thread(sock.sendall, infer(*body(1.0, HUGE_TOKENS)))
            await runner.begun()
            await until(lambda: server.arena.used_bytes == HUGE)
        await until(lambda: server.counted(499) == 1)
        await until(lambda: server.arena.used_bytes == 0)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (infer(body(1.0)[0], body(1.0)[1] + 1), 400),
        (infer(body(1.0)[0] + b"x", body(1.0)[1]), 400),
        (infer(bytes(SIZE), SIZE), 400),
        (infer(*body(666.0)), 500),
        (infer(bytes(2 * SIZE + 1), 0), 413),
        (chunked(bytes(2 * SIZE + 1), 0), 413),
        (head(f"POST {INFER} HTTP/1.1", "Transfer-Encoding: chunked") + b"fffffffffffff\r\n", 413),
        (chunked(body(1.0)[0], 0)[:-5] + b"x\r\n", 400),
        (infer(bytes(SIZE), 0, "Content-Encoding: gzip"), 400),
        (infer(gzip.compress(bytes(3 * SIZE)), 0, "Content-Encoding: gzip"), 413),
    ],
)
@on_uvloop
async def test_a_refused_body_holds_nothing(
    data: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with large() as (server, _):
        with connect(server.port) as sock:
            sending = asyncio.ensure_future(asyncio.to_thread(suppressed, sock.sendall, data))
            answer = await asyncio.to_thread(read_answer, sock)
            assert answer.status == status, answer.body
            await sending
        await until(lambda: server.counted(status) == 1)
        await until(lambda: server.arena.used_bytes == 0)
        assert values(await ask(server, request("plain", 3.0))) == {3.0}


def suppressed(call: Callable[..., object], *arguments: object) -> None:
    with suppress(OSError):
        call(*arguments)


@on_uvloop
async def test_stopping_refuses_a_body_that_has_not_arrived() -> None:
    connections: set[HttpConnection] = set()
    async with large(connections=connections) as (server, _):
        with connect(server.port) as sock:
            await asyncio.to_thread(sock.sendall, request("plain", 1.0)[:-1])
            await until(lambda: server.arena.used_bytes > 0)
            for connection in connections:
                connection.stop_reading()
            answer = await asyncio.to_thread(read_answer, sock)
        assert answer.error == "the server is shutting down, and the body had not arrived"
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert server.metric("refusals_total", model="tiny", reason="shutting_down") == 1


@on_uvloop
async def test_an_answer_before_the_end_of_its_body_outlives_a_shutdown() -> None:
    connections: set[HttpConnection] = set()
    wrong = request("plain", 1.0).replace(b"/tiny/", b"/none/")
    async with large(connections=connections) as (server, _):
        with connect(server.port) as sock:
            await asyncio.to_thread(sock.sendall, wrong[: len(wrong) // 2])
            await until(lambda: any(each.state is ConnectionState.DROPPING for each in connections))
            for connection in list(connections):
                connection.shutdown()
            await asyncio.to_thread(sock.sendall, wrong[len(wrong) // 2 :])
            await asyncio.sleep(0.05)
            (answer,) = await asyncio.to_thread(read_to_end, sock)
        assert answer.status == 404


@on_uvloop
async def test_without_memory_a_request_is_refused_before_its_body() -> None:
    async with large() as (server, runner):
        runner.gate.clear()
        with connect(server.port) as sock:
            await asyncio.to_thread(sock.sendall, request("plain", 1.0))
            await runner.begun()
            other = server.arena.take(server.arena.num_bytes - server.arena.used_bytes)
            assert other is not None
            only_head = request("plain", 2.0).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
            refused = await ask(server, only_head)
            text = "limits.max_buffered_bytes: expected memory for the request, got all of it in use"
            assert (refused.error, refused.status, refused.headers["retry-after"]) == (text, 503, "1")
            assert server.metric("refusals_total", model="tiny", reason="memory_full") == 1
            other.release()
            runner.gate.set()
            assert values(await asyncio.to_thread(read_answer, sock)) == {1.0}
        assert values(await ask(server, request("plain", 2.0))) == {2.0}
