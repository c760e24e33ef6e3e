"""Any ASGI application behind a connection: bodies, responses, failures and clients that leave."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.service.apps import serving, serving_runner, tiny_settings
from tests.service.runners import EchoRunner
from tests.service.sockets import Answer, answers, head

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def served(app: ASGIApp, talk: Talk, **limits: float) -> None:
    async def run() -> None:
        async with serving(tiny_settings(limits), serving_runner(EchoRunner()), app) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            try:
                await talk(reader, writer)
            finally:
                writer.close()

    asyncio.run(run())


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> list[Answer]:
    """Every answer until the server closes the connection."""
    writer.write(data)
    return answers(await reader.read())


async def read_body(receive: Receive) -> bytes:
    body: bytes = b""
    while True:
        message = await receive()
        assert message["type"] == "http.request"
        body += message["body"]
        if not message["more_body"]:
            return body


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await send(start(404, (b"content-length", b"0")))
    await send({"type": "http.response.body"})


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await read_body(receive)
    await send(start(200, (b"content-length", str(len(body)).encode())))
    await send({"type": "http.response.body", "body": body})


def test_a_body_that_comes_after_its_answer_is_not_kept() -> None:
    cycles: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        cycles.append(receive.__self__)  # type: ignore[attr-defined]
        await refuse(scope, receive, send)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = 16 << 20
        writer.write(head("POST /a HTTP/1.1", f"Content-Length: {size}"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 404")
        for _ in range(16):
            writer.write(bytes(size // 16))
            await writer.drain()
        await ask(reader, writer, head("GET /b HTTP/1.1", "Connection: close"))
        assert [len(cycle._body) for cycle in cycles] == [0, 0]

    served(app, talk)


def test_the_scope_has_what_applications_expect() -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)
        await echo(scope, receive, send)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ask(reader, writer, head("GET /a%20b%2Fc?x=1 HTTP/1.1", "X-A: b", "Connection: close"))
        (scope,) = scopes
        assert (scope["method"], scope["path"], scope["raw_path"]) == ("GET", "/a b%2Fc", b"/a%20b%2Fc")
        assert (scope["query_string"], scope["http_version"]) == (b"x=1", "1.1")
        assert scope["headers"] == [(b"host", b"x"), (b"x-a", b"b"), (b"connection", b"close")]
        assert scope["client"] == writer.get_extra_info("sockname")
        assert scope["server"] == writer.get_extra_info("peername")

    served(app, talk)


def test_a_response_without_a_length_ends_with_the_connection() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(200, (b"content-type", b"text/plain")))
        for piece in (b"a", b"b" * 1_000_000, b"c"):
            await send({"type": "http.response.body", "body": piece, "more_body": piece != b"c"})

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("GET / HTTP/1.1"))
        top, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert b"connection: close" in top
        assert body == b"a" + b"b" * 1_000_000 + b"c"

    served(app, talk)


async def fails(scope: Scope, receive: Receive, send: Send) -> None:
    raise ZeroDivisionError


async def does_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    pass


@pytest.mark.parametrize("app", [fails, does_nothing])
def test_a_failure_is_answered(app: ASGIApp, caplog: pytest.LogCaptureFixture) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = head("GET / HTTP/1.1") + head("GET / HTTP/1.1", "Connection: close")
        got = await ask(reader, writer, data)
        assert [answer.status for answer in got] == [500, 500]
        assert got[0].error == "internal server error: see the server's log"

    served(app, talk)
    assert ("ZeroDivisionError" in caplog.text) == (app is fails)


def test_a_failure_in_a_response_ends_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(start(200, (b"content-length", b"10")))
        await send({"type": "http.response.body", "body": b"12345", "more_body": True})
        raise ZeroDivisionError

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(2 * head("GET / HTTP/1.1"))
        data = b""
        try:
            while piece := await reader.read(1000):
                data += piece
        except ConnectionResetError:
            pass
        assert data.count(b"HTTP/1.1") == 1
        assert data.endswith(b"12345")

    served(app, talk)
    assert "ZeroDivisionError" in caplog.text


def test_a_client_is_asked_for_the_body_it_holds_back() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            head("POST / HTTP/1.1", "Content-Length: 3", "Expect: 100-continue", "Connection: close")
        )
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        (answer,) = await ask(reader, writer, b"abc")
        assert answer.body == b"abc"

    served(echo, talk)


def test_a_client_that_holds_back_its_body_is_not_kept_if_nobody_asks() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = head("POST / HTTP/1.1", "Content-Length: 3", "Expect: 100-continue")
        (answer,) = await ask(reader, writer, data)
        assert (answer.status, answer.headers["connection"]) == (404, "close")

    served(refuse, talk)


def test_a_large_body_is_received_as_it_is_read() -> None:
    received: list[int] = []
    go = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        received.append(len(message["body"]))
        await go.wait()
        received.append(len(await read_body(receive)))
        await send(start(200, (b"content-length", b"0")))
        await send({"type": "http.response.body"})

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = 16 << 20
        writer.write(head("POST / HTTP/1.1", f"Content-Length: {size}", "Connection: close"))
        writer.write(bytes(size))
        while not received:
            await asyncio.sleep(0)
        assert writer.transport.get_write_buffer_size() > 0, "the client has to wait"
        go.set()
        (answer,) = answers(await reader.read())
        assert answer.status == 200
        assert sum(received) == size
        assert received[0] < 1 << 20

    served(app, talk)


def test_an_application_learns_that_its_client_has_left() -> None:
    left: list[Any] = []
    done = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await read_body(receive)
        left.append((await receive())["type"])
        await send(start(200))
        await send({"type": "http.response.body", "body": b"nobody reads it"})
        done.set()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head("POST / HTTP/1.1", "Content-Length: 3") + b"abc")
        await asyncio.sleep(0)
        writer.transport.abort()
        await asyncio.wait_for(done.wait(), 60)
        assert left == ["http.disconnect"]

    served(app, talk)
