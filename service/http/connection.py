"""One client's connection: uvicorn's httptools protocol, with our own limits, timeouts and refusals.

Besides the callbacks of asyncio and of the parser, it uses internals of uvicorn (0.34 to 0.54): the
attributes parser, url, headers, scope, flow, cycle, pipeline (newest on the left), connections, tasks and
server_state.default_headers; the keep-alive timer and its handler; and of a cycle disconnected,
response_started, response_complete, keep_alive, message_event and run_asgi. A test reports those missing.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from expertd.service.http.delivery import ABORT_STATUS, CLIENT_GONE, CONNECTION
from expertd.service.http.half_closed import HalfClosed
from expertd.service.http.request_head import (
    RefusedError,
    check_head,
    head_without_upgrade,
    origin_form,
    refusal_of,
)
from expertd.service.http.timed_protocol import TimedProtocol
from expertd.service.settings.model import Limits

logger = logging.getLogger(__name__)

# Lingering close: after a refusal, further input is read and dropped for this long. Closing a socket with
# unread bytes resets the connection, and the client would lose the response.
_LINGER_SECONDS = 2.0
_MAX_LINGERING = 256
_WARN_EVERY_SECONDS = 60.0


class SharedState:
    """State shared by all connections of a server: limits, and the lingering ones beyond max_connections."""

    def __init__(self, limits: Limits, on_refusal: Callable[[int], object]) -> None:
        self.limits = limits
        self.on_refusal = on_refusal  # called with the status of each refusal
        self.lingering = 0
        self.cut_off = 0  # connections whose client did not read its response in time
        self._warned = float("-inf")

    def warn(self) -> None:
        """Log that clients are being refused, at most once a minute."""
        if time.monotonic() - self._warned >= _WARN_EVERY_SECONDS:
            self._warned = time.monotonic()
            bound = self.limits.max_connections
            logger.warning("limits.max_connections: %d connections are open, further ones are refused", bound)


class Connection(TimedProtocol):
    """Passes requests to the application in order; each is answered, or known to be aborted, at the end."""

    def __init__(self, *arguments: Any, shared: SharedState, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._shared = shared
        self._limits = shared.limits
        self._pending: deque[RequestResponseCycle] = deque()  # parsed but not answered, oldest first
        self._in_head = self._in_body = False
        self._request_began = False  # in the bytes just parsed
        self._body_received = False  # likewise
        self._unfinished_bytes = 0  # lower bound on the bytes of an incomplete head or trailers
        self._head_bytes = 0  # upper bound on the bytes of a head: the reads that contain it
        self._read_bytes = 0  # in the read that is being parsed
        self._ignore_input = False  # after a refusal, or after the client's last request
        self._refusal: RefusedError | None = None  # sent after the pending responses
        self._lingering = False
        self._counted_lingering = False  # in shared.lingering
        self._half_closed: HalfClosed | None = None
        self.parser = self._new_parser()

    @property
    def gone(self) -> bool:
        """Whether the client is known to have disconnected."""
        return self._gone

    @property
    def sent(self) -> bool:
        """Whether the response has been written to a client that is still connected; does not wait."""
        return not (self._gone or self.flow.write_paused or self._half_closed is not None)

    @property
    def has_pending_output(self) -> bool:
        """Whether a response is not computed or not sent yet."""
        return bool(self._pending) or self.transport.get_write_buffer_size() > 0

    @property
    def more_pending(self) -> bool:
        """Whether pipelined requests wait behind the current one."""
        return len(self._pending) > 1

    async def delivered(self) -> bool:
        """Wait until the response is written; False if the client has disconnected."""
        if self.flow.write_paused and not self._gone:
            await self.flow.drain()
        if self._half_closed is not None:
            await self._half_closed.finished.wait()
            return not (self._gone or self._half_closed.reset)
        return not self._gone

    def stop(self, error: RefusedError) -> None:
        """Answer the current request with `error`, unless its response has begun, and close."""
        if self._pending and not self._pending[0].response_started and not self.transport.is_closing():
            for cycle in self._pending:
                cycle.disconnected = True  # discards the application's own response
            self._write(error)
        self.transport.close()

    def _cut_off(self) -> None:
        self._shared.cut_off += 1
        super()._cut_off()

    # The asyncio callbacks.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) <= self._limits.max_connections:
            self._await_request()
            return
        self.connections.discard(self)
        self._shared.warn()
        if self._shared.lingering >= _MAX_LINGERING:
            transport.abort()
            return
        self._shared.lingering += 1
        self._counted_lingering = True
        bound = self._limits.max_connections
        self._refuse(RefusedError(503, f"connections: expected at most {bound}, got {bound + 1}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = self._gone or exc is not None or bool(self._pending)
        if self._half_closed is not None:
            self._half_closed.stop()
        if self._counted_lingering:
            self._shared.lingering -= 1
        # uvicorn notifies only its newest request, and drops the ones that are queued.
        for cycle in self._pending:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        while self.pipeline:
            self._run_aborted(*self.pipeline.pop())

    def eof_received(self) -> bool:  # type: ignore[override]
        if self._lingering:
            return False
        self._drop_incomplete()
        if not self._pending and self._refusal is None:
            return False
        # True keeps the transport open: the client may only have shut down its sending side.
        for cycle in self._pending:
            cycle.keep_alive = True  # HalfClosed closes the connection, after the response is acknowledged
        self._half_closed = HalfClosed(self.transport, self.loop, self._may_probe, self._abort)
        return True

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._ignore_input:
            return
        self._body_received = False
        self._read_bytes = len(data)
        self._head_bytes += self._read_bytes
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._parse_after_upgrade(data, upgrade)
        except httptools.HttpParserError as error:
            if not self._ignore_input:
                self._refuse(refusal_of(error, self.parser))
            return
        if self._in_head or self._in_body:
            self._count_unfinished(len(data))
        idle = not self._pending and self._timer is None and self.timeout_keep_alive_task is None
        if idle and not self._ignore_input:
            self._await_rest()

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        if self._ignore_input:
            raise RefusedError(400, "connection: expected no request after the last, got another")
        super().on_message_begin()
        self._in_head = self._request_began = True
        self._head_bytes = self._read_bytes

    def on_headers_complete(self) -> None:
        check_head(self.parser, self.url, self.headers, self._limits, self._head_bytes)
        if self.parser.should_upgrade():
            return  # _parse_after_upgrade parses it again, without its Upgrade header
        if self.url[:1] != b"/":
            self.url = origin_form(self.url)
        self.scope["state"][CONNECTION] = self
        super().on_headers_complete()
        if not self.parser.should_keep_alive():
            self.cycle.keep_alive = False
        self._pending.append(self.cycle)
        self.headers = []  # trailers are not the request's headers
        self._in_head, self._in_body = False, True
        self._unfinished_bytes = 0
        if self._timer is not None:
            self._unset_timer()
        self._unset_keepalive_if_required()

    def on_body(self, body: bytes) -> None:
        self._body_received = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._in_head:  # an upgrade: parsed again
            return
        super().on_message_complete()
        self._in_body = False
        self._ignore_input = not self.cycle.keep_alive
        if not self._pending:  # answered before its body had arrived
            self._unset_timer()
            self._await_request()

    def on_response_complete(self) -> None:
        self._pending.popleft()
        was_last = not self.pipeline
        super().on_response_complete()
        if self.transport.is_closing():
            self._set_timer(self.timeout_keep_alive, self._close_unread)
        elif was_last and self._refusal is not None:
            self._linger(self._refusal)
        elif was_last and self._half_closed is not None:
            self._unset_keepalive_if_required()
            self._half_closed.finish()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # We refuse other versions, and data after the last request, with messages of our own.
        parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_version=True)
        return parser

    def _parse_after_upgrade(self, data: bytes, upgrade: httptools.HttpParserUpgrade) -> None:
        """Continue after a head with Upgrade, at which the parser stops to switch protocols.

        Upgrade may be ignored (RFC 9110, 7.8): without it, the rest is a body and further requests.
        """
        rest = memoryview(data)
        while True:
            head = head_without_upgrade(self.parser, self.url, self.headers)
            rest = rest[upgrade.args[0] :]
            self.parser = self._new_parser()
            self.parser.feed_data(head)
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as another:
                upgrade = another

    def _count_unfinished(self, size: int) -> None:
        if self._request_began or self._body_received:
            self._request_began = False
            self._unfinished_bytes = 0  # only some of these bytes belong to a head: at most one read
            return
        self._unfinished_bytes += size
        if self._unfinished_bytes > self._limits.max_header_bytes:
            what = "request line and headers" if self._in_head else "trailers"
            bound = self._limits.max_header_bytes
            self._refuse(RefusedError(431, f"{what}: expected at most {bound} bytes, got more"))

    def _drop_incomplete(self, status: int = CLIENT_GONE) -> None:
        """Abort the newest request, with `status`, if its body is incomplete."""
        cycle = self.cycle
        if not self._in_body or cycle not in self._pending:
            return
        self._pending.remove(cycle)
        cycle.scope["state"][ABORT_STATUS] = status
        cycle.disconnected = True
        cycle.message_event.set()
        if self.pipeline and self.pipeline[0][0] is cycle:
            self._run_aborted(*self.pipeline.popleft())

    def _run_aborted(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Run the application on a request whose client has disconnected, so that it is counted."""
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    # Refusals.

    def _refuse(self, error: RefusedError) -> None:
        """Send `error` after all pending responses, and close."""
        logger.debug("refused input from %s: %d, %s", self.client, error.status, error)
        self._shared.on_refusal(error.status)
        self._ignore_input = True
        self._unset_timer()
        answering = self._in_body and self.cycle.response_started
        self._drop_incomplete(error.status)
        if answering:
            self.transport.close()
        elif self._pending:
            self._refusal = error
        else:
            self._linger(error)

    def _linger(self, error: RefusedError) -> None:
        if self.transport.is_closing():
            return
        self._lingering = True
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        self._write(error)
        self.transport.write_eof()
        self._set_timer(_LINGER_SECONDS, self.transport.abort)

    def _write(self, error: RefusedError) -> None:
        is_head = self.parser.get_method() == b"HEAD"
        self.transport.write(error.response(self.server_state.default_headers, with_body=not is_head))

    def _await_rest(self) -> None:
        if self._in_body:  # of a request that is answered already
            self._set_timer(self._limits.body_timeout_seconds, self.transport.close)
        else:
            self._set_timer(self._limits.header_timeout_seconds, self._refuse_late_head)

    def _refuse_late_head(self) -> None:
        seconds = self._limits.header_timeout_seconds
        self._refuse(
            RefusedError(408, f"headers: expected all headers within {seconds:g} s, got a part of them")
        )

    def _may_probe(self) -> bool:
        """Whether an interim response can be sent for the current request."""
        if not self._pending or self._pending[0].response_started:
            return False
        return self._pending[0].scope["http_version"] == "1.1"
