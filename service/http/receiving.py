"""How a connection begins requests and receives their bodies.

Large infer bodies are received directly into a block of the arena, small ones and those of the application
from the bytes that were read.
"""

from typing import Any

from expertd.service.http.asgi_cycle import AsgiCycle, scope_of
from expertd.service.http.delivery import CONNECTION
from expertd.service.http.framing import ChunkedBody, FixedBody, Sink, end_of
from expertd.service.http.infer_head import HttpHead
from expertd.service.http.protocol import OipError
from expertd.service.http.replies import Replies
from expertd.service.http.request_head import RequestHead
from expertd.service.http.shared import ServerState, Shared
from expertd.service.inference.body import LARGE_BYTES, InferBody
from expertd.service.inference.call import InferCall
from expertd.service.inference.errors import RequestError

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Receiving(Replies):
    """Input that is not handled yet is `_data` from `_position` on."""

    def __init__(
        self, shared: Shared, state: ServerState, app_state: dict[str, Any], is_admitted: bool
    ) -> None:
        super().__init__(shared, state, is_admitted)
        self._app_state = app_state
        self._data = b""
        self._position = 0
        self._body: FixedBody | ChunkedBody | None = None  # while it is incomplete
        self._is_feeding = False  # with a part of the input, behind which `_position` has not moved yet
        self._infer_body: InferBody | None = None  # where it goes
        self._reads_infer_body = False  # directly from the socket
        self._drops_body = False  # the request is answered already
        self._asked = False  # for the body, with 100 Continue
        self._is_paused = False  # reading

    @property
    def has_input(self) -> bool:
        return self._position < len(self._data)

    @property
    def more_pending(self) -> bool:
        if self._body is None or self._is_feeding:
            return self.has_input
        end = end_of(self._body, self._data, self._position)
        return end is not None and end < len(self._data)

    @property
    def _has_unread(self) -> bool:
        return self._body is not None or self._is_paused

    @property
    def _waits_for_body(self) -> bool:
        assert self._head is not None
        return self._head.expects_continue and self._body is not None and not self._asked

    def stop_reading(self) -> None:
        """Answer 503 to an infer request whose body has not arrived: it was never accepted."""
        if self._infer_body is not None:
            sentence = "the server is shutting down, and the body had not arrived"
            self._refuse_body(
                OipError(503, sentence, reason="shutting_down", headers={"Connection": "close"})
            )

    # Requests.

    def _begin_infer(self, head: RequestHead, infer: HttpHead) -> None:
        endpoint = self._shared.endpoint
        arena = endpoint.engine.arena
        call = self._call = InferCall(endpoint, infer, self, arena)
        length = head.content_length or 0
        begin, end = self._position, self._position + length
        if not head.chunked and length < LARGE_BYTES and end <= len(self._data):
            self._position = end
            if call.admit():
                call.receive(self._data[begin:end])
            return
        self._body = self._framing(head, None)
        if not call.admit():
            return
        try:
            self._infer_body = InferBody(arena, infer.limit, head.content_length, infer.header_length)
        except RequestError as error:
            call.refuse(error)
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
        task = self.loop.create_task(cycle.run(self._shared.app))
        task.add_done_callback(self._state.tasks.discard)
        self._state.tasks.add(task)

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
        body, self._infer_body = self._infer_body, None
        self._body = None
        self._drops_body = self._reads_infer_body = False
        if isinstance(self._call, AsgiCycle):
            self._call.end_body()
        elif body is not None:
            assert isinstance(self._call, InferCall)
            self._timer.clear()
            self._call.receive(body.content(), body)
        elif self._call is None:
            self._settle()

    def receive_body(self, more: bool) -> None:
        if more is self._is_paused:
            self._is_paused = not more
            if more:
                self.transport.resume_reading()
            else:
                self.transport.pause_reading()

    def ask_for_body(self) -> None:
        assert self._head is not None
        if self._waits_for_body and not self.has_input:
            self._asked = True
            self.transport.write(_CONTINUE)

    # Bodies that do not arrive.

    def _refuse_body(self, error: RequestError) -> None:
        """Answer an infer request before its body has arrived; what arrives later is dropped."""
        assert isinstance(self._call, InferCall)
        self._timer.clear()
        self._forget_body()
        self._call.refuse(error)

    def _forget_body(self) -> None:
        if self._body is not None:
            self._body.sink = None
        if self._infer_body is not None:
            self._infer_body.release()
        self._infer_body = None
        self._reads_infer_body = False

    def _refuse_late_body(self) -> None:
        seconds = self._limits.body_timeout_seconds
        text = f"body: expected the whole body within {seconds:g} s, got a part of it"
        # Else the rest of the body would be parsed as a request.
        self._refuse_body(OipError(408, text, headers={"Connection": "close"}))

    def _drop_incomplete(self, error: RequestError | None = None) -> None:
        if self._body is None:
            return
        self._timer.clear()
        self._forget_body()
        self._body = None
        if self._call is not None and not self._is_answered:
            call, self._call = self._call, None
            call.leave(error)
