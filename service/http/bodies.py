"""Reads request bodies, with a limit on size and time, and only until the server stops."""

import asyncio

from starlette.requests import Request
from starlette.types import Receive

from expertd.service.http.protocol import OipError
from expertd.service.inference.limits import BodyLimit
from expertd.service.settings.parts import Limits
from expertd.service.util.sentences import shown

CONTROL_BODY = BodyLimit(64 * 1024)
# In an ASGI message of our own server: bytes that the body is known to have after this part of it.
BYTES_AHEAD = "expertd.bytes_ahead"


class ClientGoneError(Exception):
    """The caller closed the connection before its answer."""


class BodyReader:
    """Reads the bodies of all routes, so that no slow body delays a shutdown or holds a connection."""

    def __init__(self, limits: Limits) -> None:
        self._seconds = limits.body_timeout_seconds
        self._stopped = False
        self._reading: set[asyncio.Timeout] = set()

    def stop(self) -> None:
        """Answer 503 to every request whose body has not arrived yet: it was never accepted."""
        self._stopped = True
        for reading in self._reading:
            if not reading.expired():
                reading.reschedule(0)

    async def read(self, receive: Receive, content_length: int | None) -> bytes:
        """The whole body of a control call.

        Raises RequestError (also as soon as the body is known to be too long), ClientGoneError.
        """
        try:
            async with asyncio.timeout(0 if self._stopped else self._seconds) as reading:
                self._reading.add(reading)
                try:
                    return await _read(receive, content_length)
                finally:
                    self._reading.discard(reading)
        except TimeoutError as error:
            close = {"Connection": "close"}  # else the rest of the body would be parsed as a request
            if self._stopped:
                sentence = "the server is shutting down, and the body had not arrived"
                raise OipError(503, sentence, reason="shutting_down", headers=close) from error
            sentence = f"body: expected the whole body within {self._seconds:g} s, got a part of it"
            raise OipError(408, sentence, headers=close) from error


async def _read(receive: Receive, content_length: int | None) -> bytes:
    if content_length is not None:
        CONTROL_BODY.check(content_length)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")
        CONTROL_BODY.check(len(body), is_whole=True)
        return body
    chunks: list[bytes] = []
    size = 0
    while True:
        if message["type"] != "http.request":
            raise ClientGoneError
        chunk = message.get("body", b"")
        chunks.append(chunk)
        size += len(chunk)
        CONTROL_BODY.check(size + message.get(BYTES_AHEAD, 0))
        if not message.get("more_body", False):
            return b"".join(chunks)
        message = await receive()


def number_of_bytes(value: bytes, header: str, earlier: int | None) -> int:
    """Parse a header that holds a number of bytes; `earlier` is the value of a previous one, if any.

    Raises OipError (400) if it is not a number, or if the two headers disagree.
    """
    if not (value.isdigit() and len(value) < 16):
        raise OipError(400, f"{header}: expected a number of bytes, got {shown(value.decode('latin-1'))}")
    number = int(value)
    if earlier not in (None, number):
        raise OipError(400, f"{header}: expected one number of bytes, got {earlier} and {number}")
    return number


async def control_body(request: Request, bodies: BodyReader) -> bytes:
    """The body of a control call (any but infer): kept small, because it is parsed on the event loop.

    Raises as `BodyReader.read` does, and OipError (400, 415).
    """
    length = None
    for name, value in request.scope["headers"]:
        if name == b"content-length":
            length = number_of_bytes(value, "Content-Length", length)
        elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            got = shown(value.decode("latin-1"))
            raise OipError(415, f"Content-Encoding: expected none for this call, got {got}")
    return await bodies.read(request.receive, length)
