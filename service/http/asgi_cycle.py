"""One request to the ASGI application: every call but infer."""

import asyncio
import logging
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Scope

from expertd.service.http.bodies import BYTES_AHEAD
from expertd.service.http.paced_transport import PacedTransport
from expertd.service.http.protocol import error_body
from expertd.service.http.request_head import RequestHead, decoded
from expertd.service.http.responses import Headers
from expertd.service.inference.errors import RequestError

logger = logging.getLogger(__name__)

_MAX_UNREAD_BYTES = 64 * 1024  # of a body; further ones are received when the application has read these
_WITHOUT_BODY = (204, 304)
CONNECTION = "expertd.connection"


class ConnectionView(Protocol):
    """A connection as the application sees it: in the scope's `state` under the key CONNECTION."""

    @property
    def more_pending(self) -> bool:
        """Whether pipelined requests wait behind the current one."""


class Conversation(Protocol):
    """What a cycle needs of its connection."""

    transport: PacedTransport

    def ask_for_body(self) -> None:
        """Send 100 Continue if the client waits for it."""

    def begin_response(self, status: int, headers: Headers, close: bool) -> bytes:
        """The response's head."""

    async def written(self) -> None:
        """Wait until what was written is sent, or lost."""

    def replied(self, call: "AsgiCycle") -> None:
        """The response is complete."""


class AsgiCycle:
    """Runs the application on one request, whose body is received meanwhile."""

    def __init__(self, connection: Conversation, scope: Scope) -> None:
        self._connection = connection
        self._scope = scope
        self._body = bytearray()
        self._ahead = 0  # bytes of the current chunk that are still to come
        self._more_body = True
        self._changed = asyncio.Event()
        self._gone = False
        self._start: Message | None = None
        self._begun = self._complete = False

    async def run(self, app: ASGIApp) -> None:
        """Call the application; a failure is answered if nothing is sent yet."""
        try:
            await app(self._scope, self._receive, self._send)
        except Exception as error:
            logger.error("a request failed: %s", self._scope["path"], exc_info=error)
        if self._complete or self._gone:
            return
        if self._begun:
            self._connection.transport.abort()
            return
        body = error_body("internal server error: see the server's log")
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": 500, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    # The connection's side.

    def expect(self, num_bytes: int) -> None:
        """A chunk of this many bytes begins: the application may refuse it before it arrives."""
        self._ahead = num_bytes
        self._changed.set()

    def receive(self, piece: memoryview) -> None:
        """Take a piece of the body, which is dropped once the response is complete."""
        if self._complete:
            return
        self._body += piece
        self._ahead = max(0, self._ahead - len(piece))
        self._changed.set()
        if self.is_full:
            self._connection.transport.pause_reading()

    @property
    def is_full(self) -> bool:
        """Whether the application has to read before more of the body is received."""
        return len(self._body) > _MAX_UNREAD_BYTES

    def end_body(self) -> None:
        """The body is complete."""
        self._more_body = False
        self._changed.set()

    def leave(self, error: RequestError | None = None) -> None:
        """The client has disconnected, or its body was refused."""
        self._gone = True
        self._changed.set()

    def sent(self, delivered: bool) -> None:
        """The response was sent, or lost."""
        if not delivered:  # and the application may be sending it still
            self.leave()

    # The application's side.

    async def _receive(self) -> Message:
        if self._more_body and not self._complete:
            self._connection.ask_for_body()
        while not (self._changed.is_set() or self._gone or self._complete):
            self._connection.transport.resume_reading()
            await self._changed.wait()
        self._changed.clear()
        if self._gone or self._complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": self._more_body, BYTES_AHEAD: self._ahead}

    async def _send(self, message: Message) -> None:
        if self._gone:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        # Not every application knows that a response to HEAD has no body.
        data: bytes = b"" if self._scope["method"] == "HEAD" else message.get("body", b"")
        if not self._begun:
            assert self._start is not None
            self._begun = True
            data = self._head(self._start) + data
        self._connection.transport.write(data)
        if not message.get("more_body", False):
            self._complete = True
            self._changed.set()
            self._connection.replied(self)
        await self._connection.written()

    def _head(self, start: Message) -> bytes:
        status: int = start["status"]
        headers = list(start.get("headers", ()))
        # Without a length, the end of the connection is the end of the body (RFC 9112, 6.3).
        has_length = any(name == b"content-length" for name, _ in headers) or status in _WITHOUT_BODY
        close = not has_length or (b"connection", b"close") in headers
        kept = [header for header in headers if header[0] != b"connection"]
        return self._connection.begin_response(status, kept, close)


def connection_of(scope: Scope) -> ConnectionView | None:
    """The request's connection; None if the server is not ours."""
    connection: ConnectionView | None = scope.get("state", {}).get(CONNECTION)
    return connection


def scope_of(head: RequestHead, transport: asyncio.Transport, state: dict[str, Any]) -> Scope:
    """The ASGI scope of a request."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": head.version,
        "method": head.method,
        "scheme": "https" if transport.get_extra_info("ssl_object") else "http",
        "path": decoded(head.raw_path),
        "raw_path": head.raw_path,
        "query_string": head.query,
        "root_path": "",
        "headers": head.headers,
        "client": _address(transport, "peername"),
        "server": _address(transport, "sockname"),
        "state": state,
    }


def _address(transport: asyncio.Transport, name: str) -> tuple[str, int | None] | None:
    address = transport.get_extra_info(name)
    if isinstance(address, tuple):
        return str(address[0]), int(address[1])
    return (str(address), None) if address else None
