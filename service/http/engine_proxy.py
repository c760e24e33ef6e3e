"""Passes requests on to the engine's process, over its Unix socket: every call but infer."""

import asyncio
import re
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from expertd.service.engine.spec import MODEL_VERSION
from expertd.service.http.bodies import BodyReader, ClientGoneError, number_of_bytes
from expertd.service.http.infer_head import HttpHead
from expertd.service.http.protocol import OipError, oip_error
from expertd.service.http.responses import BROWSER_HEADERS, Answer, Headers, header_lines
from expertd.service.http.rights import rights_for
from expertd.service.inference.errors import RequestError
from expertd.service.inference.gate import KEY_ADMIN, KEY_NAME, Gate
from expertd.service.inference.head import InferHead

T = TypeVar("T")

_SECONDS = 3600.0  # for a response: loading a model may take many minutes
_MAX_HEAD_BYTES = 64 * 1024
_STREAM = "/v1/live"  # the call whose response goes on and on
_GONE = "the engine's process does not answer"
# Of one connection (RFC 9110, 7.6.1), or set here.
_OWN_HEADERS = frozenset(
    (b"connection", b"content-length", b"date", b"expect", b"host", b"keep-alive", b"transfer-encoding")
)
_DROPPED = _OWN_HEADERS | {b"authorization", KEY_NAME, KEY_ADMIN}  # of requests: the key was checked here
_TRACE = (b"traceparent", b"tracestate")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class EngineProxy:
    """An ASGI application that has the engine's process answer, on a connection for each request."""

    def __init__(self, path: Path, bodies: BodyReader, gate: Gate) -> None:
        self._gate = gate
        self._path = path
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        try:
            self._gate.admit(rights_for(scope["method"], scope["path"]), scope["headers"])
            body = await self._body(scope, receive)
            told = self._gate.told(scope["headers"])
            target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
            if scope["path"] == _STREAM and scope["method"] == "GET":
                await self._pass_on(target, scope["headers"], told, receive, send)
                return
            status, headers, content = await self._ask(
                scope["method"].encode(), target, scope["headers"], body, told, receive
            )
        except ClientGoneError:
            return
        except RequestError as error:
            refusal = oip_error(error)
            status, content = refusal.status, refusal.body()
            headers = [(name.lower().encode(), value.encode()) for name, value in refusal.headers.items()]
            length = str(len(content)).encode()
            headers += [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def forward(self, head: InferHead, key_name: str, content: bytes) -> Answer:
        """Have a whole infer request answered; see `Forward`. Raises OipError (503)."""
        assert isinstance(head, HttpHead)
        headers = []
        if head.header_length is not None:
            headers.append((b"inference-header-content-length", str(head.header_length).encode()))
        if head.accept_encoding:
            headers.append((b"accept-encoding", head.accept_encoding.encode("latin-1")))
        headers += [header for header in head.headers if header[0] in _TRACE]
        target = f"/v2/models/{head.model}/versions/{MODEL_VERSION}/infer".encode()
        told = [(KEY_NAME, key_name.encode("ascii"))] if key_name else []
        status, answered, body = await self._ask(b"POST", target, headers, content, told)
        return Answer(status, header_lines(answered), [body])

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = None
        has_body = False
        for name, value in scope["headers"]:
            has_body = has_body or name == b"transfer-encoding"
            if name == b"content-length":
                length = number_of_bytes(value, "Content-Length", length)
        if not has_body and not length:
            return b""
        return await self._bodies.read(receive, length)

    async def _ask(
        self,
        method: bytes,
        target: bytes,
        headers: Headers,
        body: bytes,
        told: Headers,
        receive: Receive | None = None,
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """The status, headers and body of the engine's response; `told`: see `Gate`.

        Raises OipError (503); ClientGoneError if the client of `receive` disconnects before.
        """
        async with self._asked(method, target, headers, body, told) as reader:
            async with asyncio.timeout(_SECONDS):
                status, answered, content = await _unless_gone(receive, _response(reader))
        length = next((int(value) for name, value in answered if name == b"content-length"), None)
        if method != b"HEAD" and length not in (None, len(content)):
            raise _no_answer()
        return status, answered, content

    async def _pass_on(
        self, target: bytes, headers: Headers, told: Headers, receive: Receive, send: Send
    ) -> None:
        """Send the engine's response as it comes, until one side ends it. Raises OipError (503)."""
        async with self._asked(b"GET", target, headers, b"", told) as reader:
            async with asyncio.timeout(_SECONDS):
                status, answered = await _head(reader)
            await send({"type": "http.response.start", "status": status, "headers": answered})
            gone = asyncio.create_task(_gone(receive))
            try:
                while piece := await _read_unless(gone, reader):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
            finally:
                gone.cancel()
            await send({"type": "http.response.body", "body": b""})

    @asynccontextmanager
    async def _asked(
        self, method: bytes, target: bytes, headers: Headers, body: bytes, told: Headers
    ) -> AsyncIterator[asyncio.StreamReader]:
        """A connection to the engine's process, to read the response from. Raises OipError (503)."""
        kept = [header for header in headers if header[0] not in _DROPPED]
        own = [(b"host", b"engine"), (b"connection", b"close"), *told]
        if body or method not in (b"GET", b"HEAD"):
            own.append((b"content-length", str(len(body)).encode()))
        request = b"%s %s HTTP/1.1\r\n%s\r\n" % (method, target, header_lines([*own, *kept]))
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=_MAX_HEAD_BYTES)
            try:
                writer.write(request)
                writer.write(body)  # not writelines: asyncio's (Python 3.12.1) keeps an empty part for ever
                yield reader
            finally:
                writer.close()
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise _no_answer() from error


def _no_answer() -> OipError:
    return OipError(503, _GONE, reason="not_ready", retry_after=1)


async def _gone(receive: Receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _response(reader: asyncio.StreamReader) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    status, headers = await _head(reader)
    return status, headers, await reader.read()


async def _unless_gone(receive: Receive | None, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ClientGoneError as soon as the client disconnects, and ends it."""
    if receive is None:
        return await work
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _read_unless(gone: "asyncio.Task[None]", reader: asyncio.StreamReader) -> bytes:
    """The next bytes of a response; b"" at its end, however it comes, and if the client is gone."""
    reading = asyncio.create_task(reader.read(_MAX_HEAD_BYTES))
    try:
        await asyncio.wait((gone, reading), return_when=asyncio.FIRST_COMPLETED)
        return reading.result() if reading.done() else b""
    except OSError:  # the response has begun: there is no other way to say so
        return b""
    finally:
        reading.cancel()


async def _head(reader: asyncio.StreamReader) -> tuple[int, list[tuple[bytes, bytes]]]:
    """The status and headers of a response. Raises ValueError if they are incomplete."""
    while True:
        top = (await reader.readuntil(b"\r\n\r\n"))[:-4]
        line, *lines = top.split(b"\r\n")
        status = _STATUS.match(line)
        if status is None:
            raise ValueError("expected a response")
        if not status[1].startswith(b"1"):
            break
    parts = [each.partition(b": ") for each in lines]
    headers = [(name, value) for name, _, value in parts]
    dropped = _OWN_HEADERS - {b"content-length"} | {name.encode() for name, _ in BROWSER_HEADERS}
    return int(status[1]), [header for header in headers if header[0] not in dropped]
