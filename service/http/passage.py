"""Passes requests on to the engine's process, over its Unix socket: every call but infer."""

import asyncio
import re
from pathlib import Path

from starlette.types import Receive, Scope, Send

from expertd.service.engine.spec import MODEL_VERSION
from expertd.service.http.bodies import CONTROL_BODY, BodyReader, ClientGoneError, number_of_bytes
from expertd.service.http.gate import KEY_NAME, Gate
from expertd.service.http.infer_head import InferHead
from expertd.service.http.protocol import OipError
from expertd.service.http.refused import BROWSER_HEADERS, Headers, header_lines

_SECONDS = 300.0  # for a response: unregistering a region waits for its requests, partitions for graphs
_MAX_HEAD_BYTES = 64 * 1024
_GONE = "the engine's process does not answer"
# Of one connection (RFC 9110, 7.6.1), or set here.
_OWN_HEADERS = frozenset(
    (b"connection", b"content-length", b"date", b"expect", b"host", b"keep-alive", b"transfer-encoding")
)
_DROPPED = _OWN_HEADERS | {b"authorization", KEY_NAME}  # of requests: the key was checked here
_TRACE = (b"traceparent", b"tracestate")
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")


class Passage:
    """An ASGI application that has the engine's process answer, on a connection for each request."""

    def __init__(self, path: Path, bodies: BodyReader, gate: Gate) -> None:
        self._gate = gate
        self._path = path
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on."""
        try:
            self._gate.admit(scope["method"], scope["path"], scope["headers"])
            body = await self._body(scope, receive)
            caller = self._gate.caller(scope["headers"])
            target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
            status, headers, content = await self._ask(
                scope["method"].encode(), target, scope["headers"], body, caller
            )
        except ClientGoneError:
            return
        except OipError as error:
            status, content = error.status, error.body()
            headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
            length = str(len(content)).encode()
            headers += [(b"content-type", b"application/json"), (b"content-length", length)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def forward(self, head: InferHead, content: bytes) -> tuple[int, bytes, bytes]:
        """Have a whole infer request answered; see `Forward`. Raises OipError (503)."""
        headers = []
        if head.header_length is not None:
            headers.append((b"inference-header-content-length", str(head.header_length).encode()))
        if head.accept_encoding:
            headers.append((b"accept-encoding", head.accept_encoding.encode("latin-1")))
        headers += [header for header in head.headers if header[0] in _TRACE]
        target = f"/v2/models/{head.model}/versions/{MODEL_VERSION}/infer".encode()
        status, answered, body = await self._ask(b"POST", target, headers, content, head.key_name)
        return status, header_lines(answered), body

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        length = None
        has_body = False
        for name, value in scope["headers"]:
            has_body = has_body or name == b"transfer-encoding"
            if name == b"content-length":
                length = number_of_bytes(value, "Content-Length", length)
        if not has_body and not length:
            return b""
        return await self._bodies.read(receive, length, CONTROL_BODY)

    async def _ask(
        self, method: bytes, target: bytes, headers: Headers, body: bytes, caller: str
    ) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """The status, headers and body of the engine's response. Raises OipError (503)."""
        kept = [header for header in headers if header[0] not in _DROPPED]
        own = [(b"host", b"engine"), (b"connection", b"close")]
        if caller:
            own.append((KEY_NAME, caller.encode("ascii")))
        if body or method not in (b"GET", b"HEAD"):
            own.append((b"content-length", str(len(body)).encode()))
        request = b"%s %s HTTP/1.1\r\n%s\r\n" % (method, target, header_lines([*own, *kept]))
        try:
            async with asyncio.timeout(_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._path, limit=_MAX_HEAD_BYTES)
                try:
                    writer.writelines((request, body))
                    return await _response(reader, method == b"HEAD")
                finally:
                    writer.close()
        except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise OipError(503, _GONE, reason="not_ready", headers={"Retry-After": "1"}) from error


async def _response(
    reader: asyncio.StreamReader, without_body: bool
) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Read a response up to the end of the connection. Raises ValueError if it is incomplete."""
    while True:
        top = (await reader.readuntil(b"\r\n\r\n"))[:-4]
        line, *lines = top.split(b"\r\n")
        status = _STATUS.match(line)
        if status is None:
            raise ValueError("expected a response")
        if not status[1].startswith(b"1"):
            break
    content = await reader.read()
    parts = [each.partition(b": ") for each in lines]
    headers = [(name, value) for name, _, value in parts]
    length = next((int(value) for name, value in headers if name == b"content-length"), None)
    if not without_body and length not in (None, len(content)):
        raise ValueError(f"expected {length} bytes, got {len(content)}")
    dropped = _OWN_HEADERS - {b"content-length"} | {name.encode() for name, _ in BROWSER_HEADERS}
    return int(status[1]), [header for header in headers if header[0] not in dropped], content
