"""One client's connection: uvicorn's httptools protocol, with this server's limits, times and refusals.

Relied on in uvicorn (0.34 to 0.54) beside the asyncio callbacks and the parser's: the attributes parser, url,
headers, scope, flow, cycle, pipeline (newest left), connections, tasks, server_state.default_headers; the
keep-alive timer with its handler; a cycle's disconnected, response_started, response_complete, keep_alive,
message_event and run_asgi. A test names each that is missing.
"""

import asyncio
import logging
import time
from collections import deque
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from expertd.service.http.delivery import CLIENT_GONE, CONNECTION, LOST_STATUS
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

# After a refusal, what the client is still sending is read and dropped for this long: closing a socket with
# unread bytes resets the connection, and the client would lose the refusal.
_LINGER_SECONDS = 2.0
_MAX_LINGERING = 256
_WARN_EVERY_SECONDS = 60.0


class Shared:
    """What all connections of a server share: its limits, and how many linger beyond max_connections."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.lingering = 0
        self._warned = float("-inf")

    def warn(self) -> None:
        """Log that clients are being refused, once a minute."""
        if time.monotonic() - self._warned >= _WARN_EVERY_SECONDS:
            self._warned = time.monotonic()
            bound = self.limits.max_connections
            logger.warning("limits.max_connections: %d are open, and more are refused", bound)


class Connection(TimedProtocol):
    """Gives requests to the application in their order, and ends with each answered or known to be lost."""

    def __init__(self, *arguments: Any, shared: Shared, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._shared = shared
        self._limits = shared.limits
        self._due: deque[RequestResponseCycle] = deque()  # parsed and unanswered, oldest first
        self._in_head = self._in_body = False
        self._began = False  # a request did, in the bytes just parsed
        self._body_came = False  # likewise
        self._unfinished_bytes = 0  # of a head or of trailers that are still coming, at least
        self._head_bytes = 0  # of a head, at most: the reads that it came in
        self._read_bytes = 0  # by the read that is being parsed
        self._deaf = False  # nothing more is parsed: refused, or the client's last request is here
        self._refusal: RefusedError | None = None  # to be sent when its turn comes
        self._lingering = False
        self._counted = False  # in shared.lingering
        self._half_closed: HalfClosed | None = None
        self.parser = self._new_parser()

    @property
    def gone(self) -> bool:
        """Whether the client is known to have left."""
        return self._gone

    @property
    def sent(self) -> bool:
        """Whether the answer has left this process for a client still there, known without waiting."""
        return not (self._gone or self.flow.write_paused or self._half_closed is not None)

    @property
    def owes(self) -> bool:
        """Whether an answer is not computed or not sent yet."""
        return bool(self._due) or self.transport.get_write_buffer_size() > 0

    @property
    def more_due(self) -> bool:
        """Whether pipelined requests wait behind the one in turn."""
        return len(self._due) > 1

    async def delivered(self) -> bool:
        """Return once the answer just sent has been handed on; False if the client has left."""
        if self.flow.write_paused and not self._gone:
            await self.flow.drain()
        if self._half_closed is not None:
            await self._half_closed.settled.wait()
            return not (self._gone or self._half_closed.reset)
        return not self._gone

    def stop(self, error: RefusedError) -> None:
        """Answer the request in turn with `error`, unless its answer has begun, and close."""
        if self._due and not self._due[0].response_started and not self.transport.is_closing():
            for cycle in self._due:
                cycle.disconnected = True  # whatever the application still sends
            self._write(error)
        self.transport.close()

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
        self._counted = True
        bound = self._limits.max_connections
        self._refuse(RefusedError(503, f"connections: expected at most {bound}, got one more"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = self._gone or exc is not None or bool(self._due)
        if self._half_closed is not None:
            self._half_closed.stop()
        if self._counted:
            self._shared.lingering -= 1
        # uvicorn marks its newest request only, and forgets those whose turn had not come.
        for cycle in self._due:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)
        while self.pipeline:
            self._start_lost(*self.pipeline.pop())

    def eof_received(self) -> bool:  # type: ignore[override]
        if self._lingering:
            return False
        self._drop_incomplete()
        if not self._due and self._refusal is None:
            return False
        # True keeps the transport open: the client may only have shut down its sending side.
        for cycle in self._due:
            cycle.keep_alive = True  # HalfClosed closes, once it knows what became of the answer
        self._half_closed = HalfClosed(self.transport, self.loop, self._may_probe, self._abort)
        return True

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._deaf:
            return
        self._body_came = False
        self._read_bytes = len(data)
        self._head_bytes += self._read_bytes
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._parse_after_upgrade(data, upgrade)
        except httptools.HttpParserError as error:
            if not self._deaf:
                self._refuse(refusal_of(error, self.parser))
            return
        if self._in_head or self._in_body:
            self._count_unfinished(len(data))
        if not self._due and self._timer is None and self.timeout_keep_alive_task is None and not self._deaf:
            self._await_rest()

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        if self._deaf:
            raise RefusedError(400, "nothing is expected after the last request of a connection")
        super().on_message_begin()
        self._in_head = self._began = True
        self._head_bytes = self._read_bytes

    def on_headers_complete(self) -> None:
        check_head(self.parser, self.url, self.headers, self._limits, self._head_bytes)
        if self.parser.should_upgrade():
            return  # _parse gives it to another parser, without its Upgrade
        if self.url[:1] != b"/":
            self.url = origin_form(self.url)
        self.scope["state"][CONNECTION] = self
        super().on_headers_complete()
        if not self.parser.should_keep_alive():
            self.cycle.keep_alive = False
        self._due.append(self.cycle)
        self.headers = []  # trailers are not the request's headers
        self._in_head, self._in_body = False, True
        self._unfinished_bytes = 0
        if self._timer is not None:
            self._unset_timer()
        self._unset_keepalive_if_required()

    def on_body(self, body: bytes) -> None:
        self._body_came = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._in_head:  # of an upgrade: it comes again
            return
        super().on_message_complete()
        self._in_body = False
        self._deaf = not self.cycle.keep_alive
        if not self._due:  # answered before its body had come
            self._unset_timer()
            self._await_request()

    def on_response_complete(self) -> None:
        self._due.popleft()
        was_last = not self.pipeline
        super().on_response_complete()
        if self.transport.is_closing():
            self._set_timer(self.timeout_keep_alive, self._close_unread)
        elif was_last and self._refusal is not None:
            self._linger(self._refusal)
        elif was_last and self._half_closed is not None:
            self._unset_keepalive_if_required()
            self._half_closed.settle()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Other versions and data after the last request are not for the parser to answer.
        parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_version=True)
        return parser

    def _parse_after_upgrade(self, data: bytes, upgrade: httptools.HttpParserUpgrade) -> None:
        """Go on where the parser has stopped, after a head, as it takes the rest for another protocol.

        Without its Upgrade, which may be ignored (RFC 9110, 7.8), the rest is a body and further requests.
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
        if self._began or self._body_came:
            self._began = False
            self._unfinished_bytes = 0  # which bytes of these belong to a head is not known, and they are few
            return
        self._unfinished_bytes += size
        if self._unfinished_bytes > self._limits.max_header_bytes:
            what = "request line and headers" if self._in_head else "trailers"
            bound = self._limits.max_header_bytes
            self._refuse(RefusedError(431, f"{what}: expected at most {bound} bytes, got more"))

    def _drop_incomplete(self, status: int = CLIENT_GONE) -> None:
        """Tell the newest request, if its body is still coming, that it never will, and what it ends in."""
        cycle = self.cycle
        if not self._in_body or cycle not in self._due:
            return
        self._due.remove(cycle)
        cycle.scope["state"][LOST_STATUS] = status
        cycle.disconnected = True
        cycle.message_event.set()
        if self.pipeline and self.pipeline[0][0] is cycle:
            self._start_lost(*self.pipeline.popleft())

    def _start_lost(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Run the application on a request that nobody waits for: it sees so, and counts it."""
        task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    # Refusals.

    def _refuse(self, error: RefusedError) -> None:
        """Answer what cannot be given to the application, after all that came before it, and close."""
        logger.debug("refused bytes of %s: %d, %s", self.client, error.status, error)
        self._deaf = True
        self._unset_timer()
        answering = self._in_body and self.cycle.response_started
        self._drop_incomplete(error.status)
        if answering:
            self.transport.close()
        elif self._due:
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
        if self._in_body:  # of a request that has its answer already
            self._set_timer(self._limits.body_timeout_seconds, self.transport.close)
        else:
            self._set_timer(self._limits.header_timeout_seconds, self._refuse_late_head)

    def _refuse_late_head(self) -> None:
        seconds = self._limits.header_timeout_seconds
        self._refuse(
            RefusedError(408, f"headers: expected all of them within {seconds:g} s, got a part of them")
        )

    def _may_probe(self) -> bool:
        """Whether the request in turn can be sent an interim response."""
        if not self._due or self._due[0].response_started:
            return False
        return self._due[0].scope["http_version"] == "1.1"
