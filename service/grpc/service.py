"""The calls of both services, inference and health: who may make them, how many at once, how they end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from expertd.service.grpc.arrivals import Arrivals, Arrived
from expertd.service.grpc.control import CALLS, answer
from expertd.service.grpc.health import HEALTH, Health
from expertd.service.grpc.infer import Infer
from expertd.service.grpc.infer_request import own_id
from expertd.service.grpc.open_calls import OpenCalls, client_of
from expertd.service.grpc.statuses import Refusal, refusal_of
from expertd.service.grpc.stream import StreamCall
from expertd.service.grpc.tables import SERVICE
from expertd.service.http.app import ExpertApp
from expertd.service.http.protocol import OipError
from expertd.service.http.rights import rights_for
from expertd.service.inference.endpoint import InferEndpoint
from expertd.service.inference.errors import RequestError
from expertd.service.inference.gate import Gate
from expertd.service.inference.versions import CLIENT
from expertd.service.tracing.context import Headers
from expertd.service.util.logs import with_fields

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("uvicorn.access")  # as over HTTP

_HEADERS = ("authorization", CLIENT.decode())
_Work = Callable[[Arrived, Headers, Any], Awaitable[bytes | Refusal]]
_StreamWork = Callable[[AsyncIterator[bytes], Any, OipError | None], Awaitable[Refusal | None]]
_HEALTH_CALLS = ("Check", "Watch")  # which need no key
_HEALTH_SECONDS = 1.0  # for a message of them to arrive


class Service(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers calls as `app` does over HTTP; `gate` checks their keys.

    Unary calls are handled as streams of one message, so that they are checked before it is received.

    max_bytes  of a message
    """

    def __init__(self, app: ExpertApp, gate: Gate, max_bytes: int) -> None:
        self._app = app
        self._gate = gate
        self._infer = Infer(InferEndpoint(app.engine, app.metrics, gate, app.status_of, tracing=app.tracing))
        settings = app.engine.settings
        self._access_log = settings.access_log
        self._logs_ends = app.infer.logs_requests
        self._calls = OpenCalls(settings.limits)
        max_messages = max(1, settings.buffered_bytes // max_bytes)
        self._arrivals = Arrivals(max_messages, settings.limits.body_timeout_seconds)
        # Whatever is sent to the server, a probe waits for none of it.
        self._probes = Arrivals(1, min(_HEALTH_SECONDS, settings.limits.body_timeout_seconds))
        self._health = Health(app.engine, max(1, settings.limits.max_connections // 2))
        self._idle_seconds = max(settings.keep_alive_seconds, settings.limits.body_timeout_seconds)
        self._streams: set[StreamCall] = set()
        self._is_ending = False
        works: dict[str, _Work] = {name: partial(self._control, name) for name in CALLS}
        works["ModelInfer"] = self._infer
        works["Check"] = self._check
        self._handlers = {
            _path(name): grpc.stream_unary_rpc_method_handler(partial(self._unary, name, work))
            for name, work in works.items()
        }
        for name, streamed in (("ModelStreamInfer", self._streamed), ("Watch", self._watched)):
            handler = grpc.stream_stream_rpc_method_handler(partial(self._stream, name, streamed))
            self._handlers[_path(name)] = handler

    def service(self, handler_call_details: Any) -> Any:
        """The handler of a call; None if there is no such call."""
        return self._handlers.get(handler_call_details.method)

    async def end(self, seconds: float) -> int:
        """Receive no more, and wait `seconds` at most for the answers; how many are not sent by then."""
        self._is_ending = True
        self._arrivals.stop()
        self._probes.stop()
        self._health.end()
        for stream in self._streams:
            stream.end()
        return await self._calls.sent(seconds)

    async def _unary(self, name: str, work: _Work, messages: AsyncIterator[bytes], context: Any) -> bytes:
        with self._calls.one(context) as crowded:
            answer = self._result(name, work, messages, context, crowded)
            result: bytes | Refusal = await self._guarded(answer, name)
        self._log(name, result, context)
        if isinstance(result, Refusal):
            await context.abort(result.code, result.text, result.trailers)
        assert isinstance(result, bytes)
        return result

    async def _result(
        self, name: str, work: _Work, messages: AsyncIterator[bytes], context: Any, crowded: OipError | None
    ) -> bytes | Refusal:
        authorization = _authorization(context)
        if (refusal := self._refusal(name, authorization, crowded)) is not None:
            return refusal
        try:
            message = await (self._probes if name == "Check" else self._arrivals).message(messages)
        except RequestError as error:
            if name != "ModelInfer":
                raise
            return self._infer.refused(error, authorization, context)
        except asyncio.CancelledError:
            if name == "ModelInfer":
                self._infer.left(authorization, context)
            raise
        try:
            return await work(message, authorization, context)
        finally:
            message.free()

    async def _stream(
        self, name: str, work: _StreamWork, messages: AsyncIterator[bytes], context: Any
    ) -> None:
        # A client that does not read what it watches must not hold up the server's end.
        with self._calls.one(context, is_sent=name != "Watch") as crowded:
            ended = await self._guarded(work(messages, context, crowded), name)
        self._log(name, ended, context)
        if isinstance(ended, Refusal):
            await context.abort(ended.code, ended.text, ended.trailers)

    async def _streamed(
        self, messages: AsyncIterator[bytes], context: Any, crowded: OipError | None
    ) -> Refusal | None:
        authorization = _authorization(context)
        if (refusal := self._refusal("ModelInfer", authorization, crowded)) is not None:
            return refusal
        if len(self._streams) >= self._arrivals.max_messages:
            raise self._arrivals.full("stream", "open streams")
        if self._is_ending:
            raise _ending()
        stream = StreamCall(messages, partial(self._part, authorization, context), self._idle_seconds)
        self._streams.add(stream)
        try:
            await stream.run(context.write)
        finally:
            self._streams.discard(stream)
        return refusal_of(_ending()) if stream.is_cut else None

    async def _watched(
        self, messages: AsyncIterator[bytes], context: Any, crowded: OipError | None
    ) -> Refusal | None:
        self._refusal("Watch", [], crowded)
        message = await self._probes.message(messages)
        data = message.take()
        message.free()
        await self._health.watch(data, context.write)
        return None

    async def _part(self, authorization: Headers, context: Any, message: Arrived) -> bytes:
        """The answer to one message of a stream; errors are answers, too."""
        request_id = own_id(message.data)
        answer = self._infer(message, authorization, context, "ModelStreamInfer")
        return self._infer.in_stream(request_id, await self._guarded(answer, "ModelStreamInfer"))

    async def _guarded(self, work: Awaitable[Any], name: str) -> Any:
        """The result of `work`, or of the error that it raises, without its internals."""
        try:
            return await work
        except RequestError as error:
            return refusal_of(error)
        except Exception:
            logger.exception("a gRPC call failed: %s", name)
            return refusal_of(
                RequestError("internal server error: see the server's log", reason="internal_error")
            )

    def _log(self, name: str, result: bytes | Refusal | None, context: Any) -> None:
        if self._access_log and not (self._logs_ends and name == "ModelInfer"):
            who, client = self._gate.name_of(_authorization(context)), client_of(context.peer())
            code, status = (result.code.name, result.status) if isinstance(result, Refusal) else ("OK", 200)
            fields = with_fields(client=client, key=who, method="gRPC", path=_path(name), status=status)
            access_logger.info('%s %s "gRPC %s" %s', client, who, name, code, extra=fields)

    def _refusal(self, name: str, authorization: Headers, crowded: OipError | None) -> Refusal | None:
        """Why a call is refused before its message is received; None if it is not. Raises RequestError."""
        if crowded is not None:
            self._app.metrics.connection_refused("too_many_connections")
            raise crowded
        if name == "ModelInfer":
            return self._infer.refusal_of_unknown(authorization)
        if name not in _HEALTH_CALLS:
            self._gate.admit(rights_for(CALLS[name].method, CALLS[name].path), authorization)
        return None

    async def _control(self, name: str, message: Arrived, authorization: Headers, context: Any) -> bytes:
        data = message.take()
        message.free()
        return await answer(self._app, name, data)

    async def _check(self, message: Arrived, authorization: Headers, context: Any) -> bytes:
        return self._health.check(message.take())


def _path(name: str) -> str:
    return f"/{HEALTH if name in _HEALTH_CALLS else SERVICE}/{name}"


def _ending() -> RequestError:
    return RequestError("the server is shutting down", reason="shutting_down")


def _authorization(context: Any) -> Headers:
    """The metadata that names a key, and that with the client's version, as headers."""
    return [
        (name.encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in context.invocation_metadata() or ()
        if name in _HEADERS
    ]
