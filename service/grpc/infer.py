"""ModelInfer: a message through the same function as POST /v2/models/{name}/infer, and back."""

import asyncio
import json
import time
from functools import lru_cache
from typing import Any

from expertd.service.grpc.arrivals import Arrived
from expertd.service.grpc.infer_request import Translated, UntranslatedError, parts_of
from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.statuses import Refusal, code_of, refused
from expertd.service.grpc.tables import SERVICE
from expertd.service.grpc.wire import tag, with_outputs
from expertd.service.http.answers import Answer
from expertd.service.http.endpoint import InferEndpoint
from expertd.service.http.infer import InferCall
from expertd.service.http.infer_body import InferBody
from expertd.service.http.infer_ending import InferEnding
from expertd.service.http.infer_head import InferHead
from expertd.service.http.protocol import OipError
from expertd.service.http.refused import Headers
from expertd.service.http.threads import INLINE_BYTES, Where
from expertd.service.tracing import Rpc

_INFER_RESPONSE = 2  # the number of that field of ModelStreamInferResponse
_MAX_KEPT = 256
_TRACE = ("traceparent", "tracestate")
_MAX_KEPT_BYTES = 2048  # of one head, or of one response's JSON

Result = bytes | Refusal
"""A serialized ModelInferResponse, or why there is none."""


class Infer:
    """Answers messages through `endpoint`."""

    def __init__(self, endpoint: InferEndpoint) -> None:
        self._endpoint = endpoint
        self._heads: dict[tuple[object, ...], InferHead] = {}

    def refusal_of_unknown(self, authorization: Headers) -> Refusal | None:
        """Why a caller is refused before its message is received: it has no key. None if it has one."""
        gate = self._endpoint.gate
        if gate.refresh() is None or gate.knows(authorization):
            return None
        caller = _Caller()
        self._unnamed(authorization, caller).admit()
        return caller.refusal()

    def refused(self, error: OipError, authorization: Headers, context: Any) -> Refusal:
        """Why a call is refused whose message has not arrived."""
        caller = _Caller()
        self._unnamed(authorization, caller, self._rpc(context, "ModelInfer")).refuse(error)
        return caller.refusal()

    def left(self, authorization: Headers, context: Any, method: str = "ModelInfer") -> None:
        """Count a call that is cancelled before its message is read."""
        self._unnamed(authorization, _Caller(), self._rpc(context, method)).leave(_late(context))

    async def __call__(
        self, message: Arrived, authorization: Headers, context: Any, method: str = "ModelInfer"
    ) -> Result:
        """The answer to a serialized ModelInferRequest; cancelled, it leaves the request.

        `message` is freed once it is copied.
        """
        received_at, seconds = time.perf_counter(), context.time_remaining()
        caller, rpc = _Caller(), self._rpc(context, method)
        try:
            request = await self._translated(message, caller.loop)
        except UntranslatedError as error:
            message.free()
            self._unnamed(authorization, caller, rpc, error.model).refuse(error.refusal)
            return await caller.result
        except asyncio.CancelledError:
            self.left(authorization, context, method)
            raise
        head = self._head(request, authorization)
        call = InferCall(self._endpoint, head, caller, self._endpoint.engine.arena, rpc, request.request_id)
        if call.admit():
            self._receive(call, head, request, received_at, seconds)
        del request  # whose tensors were copied, unless they are small
        message.free()
        try:
            return await caller.result
        except asyncio.CancelledError:
            if caller.result.cancelled():  # else it has its answer, in this very turn
                call.leave(_late(context))
            raise

    def in_stream(self, request_id: str, result: Result) -> bytes:
        """A result as a serialized ModelStreamInferResponse; `request_id` is the caller's own."""
        if not isinstance(result, Refusal):
            return tag(_INFER_RESPONSE, len(result)) + result
        response = CLASSES["ModelStreamInferResponse"](error_message=result.text)
        response.infer_response.id = request_id
        message: bytes = response.SerializeToString()
        return message

    def _unnamed(
        self, authorization: Headers, caller: "_Caller", rpc: Rpc | None = None, model: str = ""
    ) -> InferCall:
        """A call that is refused or left before its request is read."""
        return InferCall(self._endpoint, InferHead(model, "", authorization), caller, rpc=rpc)

    def _rpc(self, context: Any, method: str) -> Rpc:
        """The call, with its trace context if that is used."""
        traces: Headers = ()
        if self._endpoint.tracing is not None or self._endpoint.logs_requests:
            traces = [
                (name.encode(), value.encode())
                for name, value in context.invocation_metadata() or ()
                if name in _TRACE and isinstance(value, str)
            ]
        return Rpc(f"{SERVICE}/{method}", traces, _code_name)

    async def _translated(self, message: Arrived, loop: asyncio.AbstractEventLoop) -> Translated:
        parts = parts_of(message.take(), self._endpoint.engine.settings.limits.max_json_bytes)
        if len(parts.rest) <= INLINE_BYTES:
            return parts.translate()
        is_left = False

        def translate() -> Translated:
            if is_left:
                raise asyncio.CancelledError
            return parts.translate()

        in_thread = self._endpoint.threads.run(Where.JSON_THREAD, loop, translate)
        message.used_until(in_thread)
        try:
            # Cancelled, it would leave the bytes in the thread's queue.
            return await asyncio.shield(in_thread)
        except asyncio.CancelledError:
            is_left = True
            in_thread.add_done_callback(_forget_result)
            raise

    def _receive(
        self, call: InferCall, head: InferHead, request: Translated, received_at: float, seconds: float | None
    ) -> None:
        engine = self._endpoint.engine
        body: InferBody | None = None
        try:
            body = InferBody(engine.arena, head.limit, request.num_bytes, len(request.header))
            for part in (request.header, *request.tensors):
                body.write(memoryview(part))
            content = body.content()
        except Exception as error:
            if body is not None:
                body.release()
            call.refuse(error)
        else:
            call.receive(content, body, received_at, seconds)

    def _head(self, request: Translated, authorization: Headers) -> InferHead:
        """The head of the same request over HTTP, kept for those like it."""
        sizes = len(request.header), request.num_bytes
        key = (request.model, request.version, *authorization, *sizes)
        head = self._heads.get(key)
        if head is None:
            names = (b"inference-header-content-length", b"content-length")
            headers = [(name, str(size).encode()) for name, size in zip(names, sizes, strict=True)]
            head = InferHead(request.model, request.version, [*authorization, *headers])
            size = len(request.model) + len(request.version) + sum(len(value) for _, value in authorization)
            if size <= _MAX_KEPT_BYTES:
                if len(self._heads) >= _MAX_KEPT:
                    self._heads.clear()
                self._heads[key] = head
        return head


class _Caller:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Result] = self.loop.create_future()

    def refusal(self) -> Refusal:
        """The answer to a call that is refused at once."""
        result = self.result.result()
        assert isinstance(result, Refusal)
        return result

    def reply(self, call: InferEnding, answer: Answer | None) -> None:
        if answer is None:  # the call was cancelled
            return
        is_waiting = not self.result.done()
        if is_waiting:
            self.result.set_result(_response(answer) if answer.status == 200 else refused(answer))
        call.sent(is_waiting)


def _response(answer: Answer) -> bytes:
    header, *outputs = answer.parts
    message = _kept_message if len(header) <= _MAX_KEPT_BYTES else _message
    return with_outputs(message(bytes(header)), outputs)


def _message(header: bytes) -> bytes:
    """The serialized ModelInferResponse of a response's JSON, without its tensors."""
    given = json.loads(header)
    response = CLASSES["ModelInferResponse"](
        model_name=given["model_name"], model_version=given["model_version"], id=given.get("id", "")
    )
    for entry in given["outputs"]:
        output = response.outputs.add(name=entry["name"], datatype=entry["datatype"], shape=entry["shape"])
        for name, value in entry.get("parameters", {}).items():
            if name != "binary_data_size":
                choice = "string_param" if isinstance(value, str) else "int64_param"
                setattr(output.parameters[name], choice, value)
    message: bytes = response.SerializeToString()
    return message


_kept_message = lru_cache(maxsize=_MAX_KEPT)(_message)


def _forget_result(thread: "asyncio.Future[Translated]") -> None:
    """Nobody waits for it any more: its error is no news for the log."""
    if not thread.cancelled():
        thread.exception()


def _code_name(status: int, reason: str | None) -> str:
    return str(code_of(status, reason).name)


def _late(context: Any) -> OipError | None:
    """Why a call was cancelled: by its deadline, or None: by its client."""
    left = context.time_remaining()
    if left is None or left > 0:
        return None
    return OipError(503, "the call's deadline passed", reason="queue_timeout")
