"""One client's connection: reads its requests, has them answered, and sends the answers.

Infer requests go to the infer endpoint, all others to the ASGI application, one at a time: the next begins
when the answer before it is sent. Large infer bodies are received directly into a block of the arena,
everything else into a buffer that all connections share.
"""

import asyncio
import logging
from enum import Enum
from typing import Any

from expertd.service.http.asgi_cycle import CONNECTION, AsgiCycle, scope_of
from expertd.service.http.connection_limits import MAX_REFUSED, Admission, CrowdedError, shown_peer
from expertd.service.http.framing import ChunkedBody, FixedBody, Sink, end_of
from expertd.service.http.infer_head import HttpHead
from expertd.service.http.paced_transport import YIELD_BYTES, PacedTransport, PlainTransport
from expertd.service.http.protocol import OipError
from expertd.service.http.request_head import HeadReader, RequestHead
from expertd.service.http.responses import Answer, Headers, RefusedError, header_lines
from expertd.service.http.sender import Sender
from expertd.service.http.server_context import ServerContext, UvicornState
from expertd.service.http.timer import Timer
from expertd.service.inference.admission import RequestAdmission, client_gone
from expertd.service.inference.body import LARGE_BYTES, InferBody, Received
from expertd.service.inference.call import InferCall
from expertd.service.inference.errors import RequestError
from expertd.service.util.logs import with_fields

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("uvicorn.access")

_MAX_UNREAD_BYTES = 64 * 1024  # of pipelined requests; further ones stay in the socket
_REQUESTS_AT_ONCE = 16  # that were pipelined, before other connections go on

# Lingering close: after a refusal, further input is read and dropped for this long. Closing a socket with
# unread bytes resets the connection, and the client would lose the response.
_LINGER_SECONDS = 2.0

# When the server ends, a request may be in the socket already: idle connections are read for this long.
_LAST_INPUT_SECONDS = 0.05

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_CLOSE = b"connection: close\r\n"


class ConnectionState(Enum):
    """How far the current request is: from IDLE, by HEAD unless a head arrives whole, down to SENDING, then
    IDLE again, by DROPPING if its body has not arrived. ENDED can follow every other state.

    In PENDING, WRITING and SENDING, a part of its body may still arrive: clients are answered before if what
    has arrived is enough to refuse it.
    """

    IDLE = "nothing of a request has arrived"
    HEAD = "a part of a head has arrived, or of the blank lines before one"
    PENDING = "the head is read; the answer has not begun"
    WRITING = "the answer is written"
    SENDING = "all of the answer is written; the transport may hold a part of it"
    DROPPING = "the request is answered; the rest of its body is read and dropped"
    ENDED = "input is dropped; the transport may hold a part of the last answer, or a refusal"


# Looked up once: each request compares its state many times, and an enum's member takes longer than a name.
_IDLE, _HEAD, _PENDING, _WRITING, _SENDING, _DROPPING, _ENDED = ConnectionState


class HttpConnection(asyncio.BufferedProtocol):
    """Input that is not handled yet is `_data` from `_position` on.

    is_admitted  by TLS below, which has counted the connection

    _call          what answers the current request; None in IDLE, HEAD and DROPPING
    _body          what is still missing of its body; None: nothing
    _infer_body    where that goes, until the request is answered; None: to the application, or nowhere
    _reads_rest    whether the socket is being read to `_infer_body` directly
    _is_last       whether the connection ends after the current answer
    _is_shut_down  whether it ends after the answers to what was received
    """

    def __init__(
        self,
        context: ServerContext,
        state: UvicornState,
        app_state: dict[str, Any],
        is_admitted: bool = False,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._context = context
        self._server = state
        self._app_state = app_state
        self._limits = context.limits
        self._is_admitted = is_admitted
        self._admission: Admission | None = None
        self._timer = Timer(self.loop)  # for input: idle, or a head or body that does not arrive
        self._head_reader = HeadReader(context.heads, context.limits)
        self._data = b""
        self._position = 0
        self._yielded: asyncio.Handle | None = None  # goes on after other connections
        self._is_consuming = False
        self._is_feeding = False  # a part of the input to `_body`; `_position` is before it
        self.state = _IDLE
        self._head: RequestHead | None = None
        self._call: InferCall | AsgiCycle | None = None
        self._body: FixedBody | ChunkedBody | None = None
        self._infer_body: InferBody | None = None
        self._reads_rest = False
        self._expects_continue = False  # the client does, before it sends the body
        self._is_last = self._is_shut_down = False

    # The server's side.

    @property
    def has_pending_output(self) -> bool:
        """Whether an answer is not computed or not sent yet."""
        return self._call is not None or self.transport.get_write_buffer_size() > 0

    def shutdown(self) -> None:
        """Close after the answers to what has arrived, or arrives within 50 ms if it is idle."""
        self._is_shut_down = True
        if self._call is None and not self._has_input and self.state is not _ENDED:
            self._timer.set(_LAST_INPUT_SECONDS, self._end)

    def stop_reading(self) -> None:
        """Answer 503 to an infer request whose body has not arrived: it was never accepted."""
        if self._infer_body is not None:
            sentence = "the server is shutting down, and the body had not arrived"
            self._refuse_body(
                OipError(503, sentence, reason="shutting_down", headers={"Connection": "close"})
            )

    def stop(self, error: RefusedError) -> None:
        """Answer the current request with `error`, unless its answer has begun, and close."""
        if self.transport.is_closing():
            return
        if self.state is _PENDING:
            self._forget_body()
            self._call = None  # its own answer is discarded
            self._write_refusal(error)
        self._end_input()
        self.transport.close()

    # The callbacks of asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if not isinstance(transport, PacedTransport):  # without TLS
            transport = PlainTransport(transport, self.loop, self)
        context, self.transport = self._context, transport
        self._sender = Sender(
            transport,
            self.loop,
            context.keep_alive_seconds,
            context.min_read_bytes,
            sent=self._sent,
            stalled=self._cut_off,
        )
        if not self._is_admitted:
            admission = context.connection_limits.admit(transport.get_extra_info("peername"))
            self._admission = admission
            if admission.refusal is not None:
                self._refuse_connection(admission.refusal)
                return
        self._server.connections.add(self)
        self._timer.set(context.keep_alive_seconds, self._close)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._yielded is not None:
            self._yielded.cancel()
        self._server.connections.discard(self)
        self._timer.close()
        self._sender.stop()
        self.transport.lost()
        self._drop_request()
        call, self._call = self._call, None
        if call is not None:
            if self.state is _PENDING:
                call.leave()
            else:
                call.sent(False)
        self._end_input()
        if self._admission is not None:
            self._admission.release()

    def get_buffer(self, sizehint: int) -> memoryview:
        # The rest of a large infer body is read to its place, once nothing is before it.
        infer_body = self._infer_body
        rest = None if infer_body is None or self._data else infer_body.rest
        self._reads_rest = rest is not None
        return self._context.scratch if rest is None else rest[:YIELD_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        if self._reads_rest:
            self._advance(nbytes)
            return
        if self.state is _ENDED:
            return
        data = bytes(self._context.scratch[:nbytes])
        self._data = self._data[self._position :] + data if self._data else data
        self._position = 0
        if self._yielded is None and (self._call is None or self._body is not None):
            self._consume()
        elif len(self._data) > _MAX_UNREAD_BYTES:
            self.transport.pause_reading()

    def eof_received(self) -> None:
        """The client has gone, and with it who waits for an answer; the event loop closes the transport."""
        if self._call is not None:
            self.transport.abort()

    def pause_writing(self) -> None:
        self.transport.raw_paused()

    def resume_writing(self) -> None:
        self.transport.raw_resumed()

    # Called by the transport; see `TransportOwner`.

    def writing_paused(self) -> None:
        self._sender.pause()

    def writing_resumed(self) -> None:
        self._sender.resume()

    # Input.

    @property
    def more_pending(self) -> bool:
        """Whether pipelined requests wait behind the current one, of whose body there may be a rest."""
        if self._body is None or self._is_feeding:
            return self._has_input
        end = end_of(self._body, self._data, self._position)
        return end is not None and end < len(self._data)

    @property
    def _has_input(self) -> bool:
        """Whether input waits that was not looked at."""
        return len(self._data) - self._position > self._head_reader.parsed

    def _advance(self, nbytes: int) -> None:
        """Bytes of a large infer body have arrived in place."""
        body, infer_body = self._body, self._infer_body
        assert infer_body is not None
        assert isinstance(body, FixedBody)
        infer_body.advance(nbytes)
        body.remaining -= nbytes
        if not body.remaining:
            self._end_body()
        elif nbytes == YIELD_BYTES:  # else the event loop would keep reading this socket
            self.transport.pause_reading()
            self._yield()

    def _consume(self) -> None:
        """Handle input up to a request that has to wait: for its answer, or for other connections."""
        budget = _REQUESTS_AT_ONCE
        self._is_consuming = True
        try:
            while self._position < len(self._data) and self.state is not _ENDED:
                if self._call is not None and self._body is None:
                    break
                if not budget:
                    self._yield()
                    break
                if self._body is not None:
                    self._is_feeding = True
                    self._position = self._body.feed(self._data, self._position)
                    self._is_feeding = False
                    if self._body.done:
                        self._end_body()
                    else:
                        budget = 0  # either there is no more data, or the chunks are many
                    continue
                head, self._position = self._head_reader.read(self._data, self._position)
                if head is None:
                    break
                self._timer.clear()
                self._head, self.state = head, _PENDING
                self._expects_continue = head.expects_continue
                if head.infer is None:
                    self._begin_cycle(head)
                else:
                    self._begin_infer(head, head.infer)
                budget -= 1
        except RefusedError as error:
            self._refuse_input(error)
        finally:
            self._is_consuming = self._is_feeding = False
        if self.state is _ENDED or self._position == len(self._data):
            self._data, self._position = b"", 0
        self._proceed()

    def _yield(self) -> None:
        self._yielded = self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._yielded = None
        self._consume()

    def _proceed(self) -> None:
        """Handle the next request, or wait for what the state needs."""
        if self._is_consuming or self._yielded is not None or self.state is _ENDED:
            return
        if self._infer_body is not None or self.state is _DROPPING:
            self.transport.resume_reading()
        elif self._call is not None:
            if self._body is not None and isinstance(self._call, AsgiCycle) and not self._call.is_full:
                self.transport.resume_reading()
        elif self._has_input:
            self._consume()
        elif self._is_shut_down and not self._head_reader.has_begun:
            self._end()
        else:
            self._wait_for_head()

    def _wait_for_head(self) -> None:
        self.transport.resume_reading()
        if not self._head_reader.has_begun:
            self._timer.set(self._context.keep_alive_seconds, self._close)
        elif self.state is _IDLE:
            self.state = _HEAD
            if self._is_shut_down:
                self._timer.set(_LAST_INPUT_SECONDS, self._end)
            else:
                self._timer.set(self._limits.header_timeout_seconds, self._refuse_late_head)

    # Requests.

    def _begin_infer(self, head: RequestHead, infer: HttpHead) -> None:
        endpoint = self._context.endpoint
        arena = endpoint.engine.arena
        length = head.content_length or 0
        begin, end = self._position, self._position + length
        if not head.chunked and length < LARGE_BYTES and end <= len(self._data):
            self._position = end
            received = Received(self._data[begin:end])
            call = self._call = InferCall(endpoint, infer, self, arena, received=received)
            call.resume()
            return
        self._body = self._framing(head, None)
        call = self._call = InferCall(endpoint, infer, self, arena)
        call.resume()
        if call.is_refused:
            return
        try:
            self._infer_body = InferBody(arena, infer.limit, head.content_length, infer.header_length)
        except RequestError as error:
            call.resume(error)
            return
        self._body.sink = self._receive_piece
        if isinstance(self._body, ChunkedBody):
            self._body.announce = self._expect_chunk
        self._timer.set(self._limits.body_timeout_seconds, self._refuse_late_body)
        self.ask_for_body()

    def _begin_cycle(self, head: RequestHead) -> None:
        scope = scope_of(head, self.transport, {**self._app_state, CONNECTION: self})
        cycle = self._call = AsgiCycle(self, scope)
        if head.chunked or head.content_length:
            self._body = self._framing(head, cycle.receive)
            if isinstance(self._body, ChunkedBody):
                self._body.announce = cycle.expect
        else:
            cycle.end_body()
        task = self.loop.create_task(cycle.run(self._context.app))
        task.add_done_callback(self._server.tasks.discard)
        self._server.tasks.add(task)

    def _framing(self, head: RequestHead, sink: Sink | None) -> FixedBody | ChunkedBody:
        if head.chunked:
            return ChunkedBody(sink, self._limits.max_header_bytes)
        return FixedBody(head.content_length or 0, sink)

    def _receive_piece(self, piece: memoryview) -> None:
        assert self._infer_body is not None
        try:
            self._infer_body.write(piece)
        except RequestError as error:
            self._refuse_body(error)

    def _expect_chunk(self, num_bytes: int) -> None:
        if self._infer_body is not None:  # else it is refused already
            try:
                self._infer_body.expect(num_bytes)
            except RequestError as error:
                self._refuse_body(error)

    def _end_body(self) -> None:
        """The body is complete."""
        infer_body, self._infer_body = self._infer_body, None
        self._body = None
        if isinstance(self._call, AsgiCycle):
            self._call.end_body()
        elif infer_body is not None:
            assert self._call is not None
            self._timer.clear()
            self._call.resume(Received(infer_body.content(), infer_body))
        elif self.state is _DROPPING:
            self.state = _IDLE
            self._proceed()

    # Bodies that do not arrive.

    def _refuse_body(self, error: RequestError) -> None:
        """Answer an infer request before its body has arrived; what arrives later is dropped."""
        assert isinstance(self._call, InferCall)
        self._timer.clear()
        self._forget_body()
        self._call.resume(error)

    def _refuse_late_body(self) -> None:
        seconds = self._limits.body_timeout_seconds
        text = f"body: expected the whole body within {seconds:g} s, got a part of it"
        # Else the rest of the body would be parsed as a request.
        self._refuse_body(OipError(408, text, headers={"Connection": "close"}))

    def _forget_body(self) -> None:
        if self._body is not None:
            self._body.sink = None
        if self._infer_body is not None:
            self._infer_body.release()
        self._infer_body = None

    def _drop_request(self, error: RequestError | None = None) -> None:
        """End a request whose body will not arrive, or is refused with `error`, unless it is answered."""
        if self._body is None:
            return
        self._timer.clear()
        self._forget_body()
        self._body = None
        if self.state is _PENDING:
            call, self._call = self._call, None
            assert call is not None
            call.leave(error)

    # Answers of infer requests.

    def reply(self, call: InferCall, answer: Answer) -> None:
        """Send an answer; see `Caller`. Large parts are not copied."""
        if call is not self._call:
            call.sent(False)  # the server was stopped meanwhile
            return
        first = self._begin_answer(answer.status, answer.close)
        close = _CLOSE if self._is_last else b""
        *small, last = answer.parts
        if len(last) < LARGE_BYTES:
            self.transport.write(b"".join((first, answer.fields, close, b"\r\n", *answer.parts)))
        else:
            # Not writelines: asyncio's own, up to Python 3.12.7, does not report that it holds bytes.
            self.transport.write(b"".join((first, answer.fields, close, b"\r\n", *small)))
            self.transport.write(last)
        self._written()

    # Responses of the application; see `Conversation`.

    def ask_for_body(self) -> None:
        if self._expects_continue and self._body is not None and not self._has_input:
            self._expects_continue = False
            self.transport.write(_CONTINUE)

    def begin_response(self, status: int, headers: Headers, close: bool) -> bytes:
        # A client that is not asked for its body may not send it: what comes next may be it or a request.
        first = self._begin_answer(status, close or (self._expects_continue and self._body is not None))
        return b"".join((first, header_lines(headers), _CLOSE if self._is_last else b"", b"\r\n"))

    async def written(self) -> None:
        await self._sender.wait()

    def replied(self, call: AsgiCycle) -> None:
        if call is self._call:
            self._written()

    # All answers.

    def _begin_answer(self, status: int, close: bool) -> bytes:
        """The first lines of an answer; decides whether it is the last one."""
        head = self._head
        assert head is not None
        if self.state is _PENDING:  # else the server was stopped meanwhile
            self.state = _WRITING
        ends = self._is_shut_down or self._context.engine.draining
        self._is_last = close or not head.keep_alive or (ends and not self.more_pending)
        # One that is logged when it ends needs no line here.
        if self._context.access_log and not (self._context.logs_ends and isinstance(self._call, InferCall)):
            self._log_access(head, status)
        return self._context.first_lines(status, self._server.default_headers)

    def _log_access(self, head: RequestHead, status: int) -> None:
        client = shown_peer(self.transport.get_extra_info("peername"))
        path = head.raw_path.decode()  # without the query: a caller may have put a key there
        who = self._context.endpoint.gate.name_of(head.headers)
        request = (head.method, path, head.version)
        fields = with_fields(client=client, key=who, method=head.method, path=path, status=status)
        access_logger.info('%s %s "%s %s HTTP/%s" %d', client, who, *request, status, extra=fields)

    def _written(self) -> None:
        """The answer is written; the next request begins when the transport holds none of it any more."""
        if self.state is _WRITING:
            self.state = _SENDING
        if not self._sender.holds_bytes:
            self._sent()

    def _sent(self) -> None:
        """The transport holds nothing."""
        call = self._call
        if call is None or self.state not in (_SENDING, _ENDED):
            return
        self._call = None
        call.sent(not self.transport.is_closing())
        if self._is_last:
            self._end()
            return
        if self.state is _SENDING:
            self.state = _IDLE
            if self._body is not None:
                self.state = _DROPPING
                self._forget_body()
                self._timer.set(self._limits.body_timeout_seconds, self._close)
        self._proceed()

    # Refusals of input that is no request.

    def _refuse_connection(self, refusal: CrowdedError) -> None:
        self._context.warn(refusal)
        if self._context.connection_limits.num_refused > MAX_REFUSED:
            self.transport.abort()
        else:
            self._refuse(refusal)

    def _refuse_late_head(self) -> None:
        seconds = self._limits.header_timeout_seconds
        text = f"headers: expected all headers within {seconds:g} s, got a part of them"
        self._refuse(RefusedError(408, text))

    def _refuse_input(self, error: RefusedError) -> None:
        """Refuse what is no head, or no body."""
        is_answered = self._body is not None and self.state is not _PENDING
        self._drop_request(OipError(400, "body: expected HTTP/1.1, got something else"))
        if is_answered:
            self._close()
        else:
            self._refuse(error)

    def _refuse(self, error: RefusedError) -> None:
        """Send `error`, and close."""
        client = shown_peer(self.transport.get_extra_info("peername"))
        logger.debug("refused input from %s: %d, %s", client, error.status, error)
        self._context.count_refusal(error.status)
        self.state = _ENDED
        if not self.transport.is_closing():
            self._write_refusal(error)
            self._linger()

    def _write_refusal(self, error: RefusedError) -> None:
        self.transport.write(error.response(self._server.default_headers))

    # Ends.

    def _end(self) -> None:
        """Read no further request, and close after the last answer."""
        self.state = _ENDED
        self._timer.clear()
        if self._body is not None or self.transport.is_reading_paused:  # the socket may hold unread input
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()
            self.transport.write_eof()
            self._timer.set(_LINGER_SECONDS, self.transport.abort)

    def _close(self) -> None:
        """Close an idle connection, or one whose client does not send what it should."""
        self.state = _ENDED
        self.transport.close()

    def _cut_off(self) -> None:
        """Abort a connection whose client does not read its response, or too slowly."""
        self._context.cut_off += 1
        self.transport.abort()

    def _end_input(self) -> None:
        """Count the requests that were received, but not begun, and read no others."""
        if self.state is _ENDED:
            return
        self.state = _ENDED
        rest, self._data = self._data[self._position :], b""
        self._position = position = 0
        try:
            while (end := rest.find(b"\r\n\r\n", position) + 4) > 3:
                head = self._context.heads.parse(rest[position:end])
                if head.infer is not None:
                    RequestAdmission(self._context.endpoint, head.infer).refuse_at_once(client_gone())
                body, position = self._framing(head, None), end
                while position < len(rest) and not body.done:
                    position = body.feed(rest, position)
        except RefusedError:
            return
