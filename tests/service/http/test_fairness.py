"""Pipelined requests, and bodies: their order, and fairness to other connections."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import closing

import numpy as np
import pytest
import uvloop

from expertd.service.http import connection
from expertd.service.http.framing import ChunkedBody
from expertd.service.http.paced_transport import YIELD_BYTES, PacedTransport
from expertd.service.http.request_head import HeadReader, RequestHead
from expertd.service.settings.parts import TlsSettings
from tests.service.apps import (
    HIDDEN,
    Serving,
    hidden_request,
    limits_for,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.certificates import TLS, client_context, load_tls
from tests.service.runners import EchoRunner
from tests.service.sockets import INFER, Answer, answers, connect, head, infer, read_to_end
from tests.service.waiting import until

GET = head("GET /v2/health/live HTTP/1.1")
BAD = head(f"POST {INFER} HTTP/1.1")  # refused at once: an empty body is no JSON
MANY = 2000
# Iterations of the event loop that a client in this process and a request take.
ITERATIONS = 40


def served(check: Callable[[Serving, int], Awaitable[None]]) -> None:
    async def run() -> None:
        async with serving(tiny_settings(), serving_runner(EchoRunner())) as server:
            await check(server, server.port)

    uvloop.run(run())


async def read(port: int, data: bytes) -> bytes:
    """Everything that the server answers until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("data", [GET, BAD], ids=["application", "infer"])
def test_pipelined_requests_do_not_starve_others(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    handled = 0

    def count(seen: HeadReader, data: bytes, position: int) -> tuple[RequestHead | None, int]:
        nonlocal handled
        handled += 1
        return read_head(seen, data, position)

    read_head = HeadReader.read
    monkeypatch.setattr(HeadReader, "read", count)

    async def check(server: Serving, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        last = head("GET /v2/health/live HTTP/1.1", "Connection: close")
        pipelining = asyncio.ensure_future(read(port, MANY * data + last))
        while handled < 100:
            await asyncio.sleep(0)
        before = handled
        writer.write(GET)
        assert await reader.readuntil(b"}") != b""
        between = handled - before
        writer.close()
        assert handled < MANY, "the other connection was answered meanwhile"
        assert between <= connection._REQUESTS_AT_ONCE * ITERATIONS
        got = answers(await pipelining)
        assert len(got) == MANY + 1
        assert {answer.status for answer in got[:-1]} == {200 if data is GET else 400}

    served(check)


TINY = b"1\r\n \r\n" * 512 * 64 + b"0\r\n\r\n"  # a body in chunks of one byte
CHUNKED = "Transfer-Encoding: chunked"
RAW = head(f"POST {INFER} HTTP/1.1", CHUNKED, "Inference-Header-Content-Length: 0") + TINY
INDEX = head("POST /v2/repository/index HTTP/1.1", CHUNKED) + TINY
REFUSED = head("POST /v2/models/no/infer HTTP/1.1", CHUNKED) + TINY
TINY_CHUNKS = pytest.mark.parametrize(
    ("data", "status"), [(RAW, 200), (INDEX, 400), (REFUSED, 404)], ids=["infer", "application", "refused"]
)


@TINY_CHUNKS
def test_tiny_chunks_do_not_starve_others(data: bytes, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    handled = 0

    def feed(body: ChunkedBody, data: bytes, position: int) -> int:
        nonlocal handled
        end = decode(body, data, position)
        handled += end - position
        return end

    decode = ChunkedBody.feed
    monkeypatch.setattr(ChunkedBody, "feed", feed)

    async def check(server: Serving, port: int) -> None:
        last = head("GET /v2/health/live HTTP/1.1", "Connection: close")
        sending = asyncio.ensure_future(read(port, data + last))
        max_handled = 0
        while not sending.done():
            before = handled
            await asyncio.sleep(0)
            max_handled = max(max_handled, handled - before)
        assert [answer.status for answer in answers(await sending)] == [status, 200]
        assert handled == len(TINY)
        assert max_handled <= 2 * 1000 * 3, "bytes of a thousand lines, perhaps before and after the others"

    served(check)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("direction", ["received", "sent"])
def test_large_bodies_do_not_starve_others(
    direction: str, tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 16384
    size = 4 * tokens * HIDDEN
    moved = 0

    def update(seen: connection.HttpConnection, nbytes: int) -> None:
        nonlocal moved
        moved += nbytes
        buffer_updated(seen, nbytes)

    def take(seen: PacedTransport, view: memoryview, count: int) -> None:
        nonlocal moved
        moved += count
        take_bytes(seen, view, count)

    buffer_updated, take_bytes = connection.HttpConnection.buffer_updated, PacedTransport._take
    if direction == "received":
        monkeypatch.setattr(connection.HttpConnection, "buffer_updated", update)
    else:
        monkeypatch.setattr(PacedTransport, "_take", take)

    def ask(port: int) -> list[Answer]:
        sock = connect(port)
        if tls:
            sock = client_context().wrap_socket(sock, server_hostname="localhost")
        with closing(sock):
            sock.sendall(infer(*hidden_request(np.zeros((tokens, HIDDEN), np.float32)), "Connection: close"))
            return read_to_end(sock)

    async def run() -> None:
        async with serving(
            tiny_settings(limits_for(tokens)),
            serving_runner(EchoRunner()),
            tls=load_tls(TlsSettings.model_validate(TLS)) if tls else None,
        ) as server:
            asking = asyncio.ensure_future(asyncio.to_thread(ask, server.port))
            max_moved = 0
            while not asking.done():
                before = moved
                await asyncio.sleep(0)
                max_moved = max(max_moved, moved - before)
                time.sleep(1e-3)  # in which the system's buffers fill
            assert [answer.status for answer in await asking] == [200]
            assert moved >= size
            assert YIELD_BYTES / 8 <= max_moved <= 2 * YIELD_BYTES, "perhaps before and after the others"

    uvloop.run(run())


def test_a_client_that_leaves_while_its_chunks_wait_is_counted() -> None:
    async def check(server: Serving, port: int) -> None:
        for data in (RAW[:-5], RAW[: len(RAW) // 2]):
            sock = connect(port)
            await asyncio.to_thread(sock.sendall, data)
            sock.close()
        await until(lambda: server.counted(499) == 2)

    served(check)


def test_pipelined_requests_are_answered_in_order() -> None:
    one, length = hidden_request(rows(1), id="one")
    two, _ = hidden_request(rows(1), id="two")

    async def check(server: Serving, port: int) -> None:
        chunked = head(
            f"POST {INFER} HTTP/1.1",
            "Transfer-Encoding: chunked",
            f"Inference-Header-Content-Length: {length}",
        )
        chunked += b"%x\r\n%s\r\n0\r\nX: y\r\n\r\n" % (len(two), two)
        last = head("GET /v2 HTTP/1.1", "Connection: close")
        data = b"\r\n" + infer(one, length) + GET + chunked + BAD + b"\r\n\r\n" + infer(two, length) + last
        for size in (1, 7, 100, len(data)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for begin in range(0, len(data), size):
                writer.write(data[begin : begin + size])
                await asyncio.sleep(0)
            got = answers(await reader.read())
            writer.close()
            assert [answer.status for answer in got] == [200, 200, 200, 400, 200, 200]
            ids = [b'"id":"one"' in got[0].body, b'"id":"two"' in got[2].body, b'"id":"two"' in got[4].body]
            assert ids == [True] * 3

    served(check)


def test_input_that_waits_is_bounded() -> None:
    runner = EchoRunner()

    async def run() -> None:
        connections: set[connection.HttpConnection] = set()
        async with serving(tiny_settings(), serving_runner(runner), connections=connections) as server:
            runner.gate.clear()
            data = 400 * head("GET /v2/health/live HTTP/1.1", f"X-Padding: {1000 * 'x'}")
            first = infer(*hidden_request(rows(1)))
            last = head("GET /v2 HTTP/1.1", "Connection: close")
            pipelining = asyncio.ensure_future(read(server.port, first + data + last))
            await runner.begun()
            (only,) = connections
            while not only.transport.is_reading_paused:
                await asyncio.sleep(0)
            assert len(only._data) < 300_000 < len(data)
            runner.gate.set()
            assert len(answers(await pipelining)) == 402

    uvloop.run(run())
