"""How a connection sends the answers of infer requests, and the responses of the ASGI application."""

import logging
from abc import abstractmethod

from expertd.service.http.answers import Answer
from expertd.service.http.asgi_cycle import AsgiCycle
from expertd.service.http.link import Link
from expertd.service.http.places import shown_peer
from expertd.service.http.refused import Headers, header_lines
from expertd.service.http.request_head import RequestHead
from expertd.service.http.shared import ServerState, Shared
from expertd.service.inference.body import LARGE_BYTES
from expertd.service.inference.call import InferCall
from expertd.service.util.logs import with_fields

access_logger = logging.getLogger("uvicorn.access")

_CLOSE = b"connection: close\r\n"


class Replies(Link):
    """Writes heads and bodies; large bodies are not copied."""

    def __init__(self, shared: Shared, state: ServerState, is_admitted: bool) -> None:
        super().__init__(shared, state, is_admitted)
        self._head: RequestHead | None = None  # of the current request

    @property
    @abstractmethod
    def more_pending(self) -> bool:
        """Whether pipelined requests wait behind the current one, of whose body there may be a rest."""

    @property
    @abstractmethod
    def _waits_for_body(self) -> bool:
        """Whether the client may wait for 100 Continue."""

    # Of infer requests.

    def reply(self, call: InferCall, answer: Answer | None) -> None:
        """Send an answer; see `Caller`."""
        if answer is None:
            return
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

    # Of the application; see `Conversation`.

    def begin_response(self, status: int, headers: Headers, close: bool) -> bytes:
        first = self._begin_answer(status, close or self._waits_for_body)
        return b"".join((first, header_lines(headers), _CLOSE if self._is_last else b"", b"\r\n"))

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    async def written(self) -> None:
        await self._sender.wait()

    def replied(self, call: AsgiCycle) -> None:
        if call is self._call:
            self._written()

    def abort(self) -> None:
        self._abort()

    def _begin_answer(self, status: int, close: bool) -> bytes:
        """The first lines of an answer; decides whether it is the last one."""
        head = self._head
        assert head is not None
        self._is_answered = True
        ends = self._shuts_down or self._shared.engine.draining
        self._is_last = close or not head.keep_alive or (ends and not self.more_pending)
        # One that is logged when it ends needs no line here.
        if self._shared.access_log and not (self._shared.logs_ends and isinstance(self._call, InferCall)):
            client = shown_peer(self.transport.get_extra_info("peername"))
            path = head.raw_path.decode()  # without the query: a caller may have put a key there
            who = self._shared.endpoint.gate.name_of(head.headers)
            request = (head.method, path, head.version)
            fields = with_fields(client=client, key=who, method=head.method, path=path, status=status)
            access_logger.info('%s %s "%s %s HTTP/%s" %d', client, who, *request, status, extra=fields)
        return self._shared.first_lines(status, self._state.default_headers)
