"""Reads one client's requests, and hands each to the infer endpoint or to the ASGI application.

Requests are handled one at a time: the next is parsed when the answer before it is sent. Large infer bodies
are received directly into a block of the arena, everything else into a buffer that all connections share.
"""

import asyncio
from typing import Any

from expertd.service.http.asgi_cycle import AsgiCycle
from expertd.service.http.framing import FixedBody
from expertd.service.http.link import LAST_INPUT_SECONDS
from expertd.service.http.paced_transport import TURN_BYTES
from expertd.service.http.protocol import OipError
from expertd.service.http.receiving import Receiving
from expertd.service.http.refused import RefusedError
from expertd.service.http.request_head import HeadParser
from expertd.service.http.shared import ServerState, Shared
from expertd.service.inference.call import InferCall

_MAX_UNREAD_BYTES = 64 * 1024  # of pipelined requests; further ones stay in the socket
_TURN = 16  # pipelined requests that are handled before other connections have their turn


class Connection(Receiving):
    """Finds the heads in the input, and keeps the order of requests."""

    def __init__(
        self, shared: Shared, state: ServerState, app_state: dict[str, Any], is_admitted: bool = False
    ) -> None:
        super().__init__(shared, state, app_state, is_admitted)
        self._parser: HeadParser | None = None  # of an incomplete head
        self._parsed = 0  # bytes of it
        self._blank = 0  # bytes of blank lines before a head
        self._waits_for_head = False  # since its first byte
        self._is_consuming = False
        self._turn: asyncio.Handle | None = None  # of this connection, while others have theirs
        self._read_turn: asyncio.Handle | None = None  # resumes reading the rest of a body

    @property
    def has_input(self) -> bool:
        return len(self._data) - self._position > self._parsed

    # The callbacks of asyncio.

    def connection_lost(self, exc: Exception | None) -> None:
        for turn in (self._turn, self._read_turn):
            if turn is not None:
                turn.cancel()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._reads_infer_body:
            assert self._infer_body is not None
            assert self._infer_body.rest is not None
            return self._infer_body.rest[:TURN_BYTES]
        return self._shared.scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self._reads_infer_body:
            assert self._infer_body is not None
            assert isinstance(self._body, FixedBody)
            self._infer_body.advance(nbytes)
            self._body.remaining -= nbytes
            if not self._body.remaining:
                self._end_body()
            elif (
                nbytes == TURN_BYTES and self._read_turn is None
            ):  # else the event loop would keep reading this socket
                self.receive_body(False)
                self._read_turn = self.loop.call_soon(self._take_read_turn)
            return
        if self._ignore_input:
            return
        data = bytes(self._shared.scratch[:nbytes])
        self._data = self._data[self._position :] + data if self._data else data
        self._position = 0
        if self._turn is None and (self._call is None or self._body is not None):
            self._consume()
        elif len(self._data) > _MAX_UNREAD_BYTES:
            self.receive_body(False)

    # Input.

    def _consume(self) -> None:
        """Handle input up to a request that has to wait: for its answer, or for other connections."""
        turns = _TURN
        self._is_consuming = True
        try:
            while self._position < len(self._data) and not self._ignore_input:
                if not turns and (self._call is None or self._body is not None):
                    self._turn = self.loop.call_soon(self._take_turn)
                    break
                if self._body is not None:
                    self._is_feeding = True
                    self._position = self._body.feed(self._data, self._position)
                    self._is_feeding = False
                    if self._body is not None and self._body.done:
                        self._end_body()
                    else:
                        turns = 0  # either there is no more data, or the chunks are many
                elif self._call is not None:
                    break
                elif self._read_head():
                    turns -= 1
                else:
                    break
        except RefusedError as error:
            self._refuse_input(error)
        finally:
            self._is_consuming = self._is_feeding = False
        if self._ignore_input or self._position == len(self._data):
            self._data, self._position = b"", 0
        self._settle()

    def _take_turn(self) -> None:
        self._turn = None
        self._consume()

    def _take_read_turn(self) -> None:
        self._read_turn = None
        if not self.transport.is_closing():
            self.receive_body(True)

    def _settle(self) -> None:
        if self._is_consuming or self._ignore_input or self._turn is not None:
            return
        if self._infer_body is not None:
            self.receive_body(True)
            self._reads_infer_body = self._infer_body.rest is not None
        elif self._call is not None:
            if self._body is not None and isinstance(self._call, AsgiCycle) and not self._call.is_full:
                self.receive_body(True)
        elif self._body is not None:
            self._drop_body()
        elif self.has_input:
            self._consume()
        elif self._shuts_down and not (self._parsed or self._blank):
            self._end()
        else:
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        self.receive_body(True)
        if not (self._parsed or self._blank):
            self._timer.set(self._shared.keep_alive_seconds, self._close)
        elif not self._waits_for_head:
            self._waits_for_head = True
            if self._shuts_down:
                self._timer.set(LAST_INPUT_SECONDS, self._end)
            else:
                self._timer.set(self._limits.header_timeout_seconds, self._refuse_late_head)

    def _drop_body(self) -> None:
        """Read the rest of a body whose request is answered already."""
        assert self._body is not None
        self._body.sink = None
        self.receive_body(True)
        if not self._drops_body:
            self._drops_body = True
            self._timer.set(self._limits.body_timeout_seconds, self._close)

    def _read_head(self) -> bool:
        """Begin the next request; False if its head is incomplete."""
        data = self._data
        if not self._parsed and data[self._position] in b"\r\n":
            self._skip_blank_lines()
            return True
        end = data.find(b"\r\n\r\n", self._position + max(0, self._parsed - 3)) + 4
        if end == 3:
            self._parse_incomplete()
            return False
        head_bytes = data[self._position : end]
        head = self._shared.heads.find(head_bytes) or self._shared.heads.parse(head_bytes)
        self._position = end
        self._parser, self._parsed, self._blank = None, 0, 0
        self._waits_for_head = False
        self._timer.clear()
        self._head = head
        self._is_answered = self._is_written = self._asked = False
        if head.infer is not None:
            self._begin_infer(head, head.infer)
        else:
            self._begin_cycle(head)
        return True

    def _skip_blank_lines(self) -> None:
        """Robust servers ignore them before a request line (RFC 9112, 2.2)."""
        skipped = len(self._data) - self._position - len(self._data[self._position :].lstrip(b"\r\n"))
        self._position += skipped
        self._blank += skipped
        self._check_head_bytes(self._blank)

    def _parse_incomplete(self) -> None:
        """Parse what there is of a head, so that invalid input is refused at once."""
        size = len(self._data) - self._position
        self._check_head_bytes(size)
        if self._parser is None:
            self._parser = HeadParser(self._limits)
        if self._parser.feed(self._data[self._position + self._parsed :]) is not None:
            raise RefusedError(
                400, "request: expected HTTP/1.1, got invalid input: no empty line after a head"
            )
        self._parsed = size

    def _check_head_bytes(self, size: int) -> None:
        limit = self._limits.max_header_bytes
        if size > limit:
            text = f"request line and headers: expected at most {limit} bytes, got at least {size}"
            raise RefusedError(431, text)

    # Refusals.

    def _refuse_late_head(self) -> None:
        seconds = self._limits.header_timeout_seconds
        text = f"headers: expected all headers within {seconds:g} s, got a part of them"
        self._refuse(RefusedError(408, text))

    def _refuse_input(self, error: RefusedError) -> None:
        """Refuse what is no request, or no body of one."""
        was_answered = self._body is not None and (self._call is None or self._is_answered)
        self._drop_incomplete(OipError(400, "body: expected HTTP/1.1, got something else"))
        if was_answered:
            self._ignore_input = True
            self.transport.close()
        else:
            self._refuse(error)

    def _leave_rest(self) -> None:
        rest, self._data = self._data[self._position :], b""
        position = 0
        try:
            while (end := rest.find(b"\r\n\r\n", position) + 4) > 3:
                head = self._shared.heads.parse(rest[position:end])
                if head.infer is not None:
                    InferCall(self._shared.endpoint, head.infer, self).leave()
                body, position = self._framing(head, None), end
                while position < len(rest) and not body.done:
                    position = body.feed(rest, position)
        except RefusedError:
            return
