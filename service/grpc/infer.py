"""ModelInfer: from a message to a request, and from its output to a message."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

from expertd.service.grpc.arrivals import Arrived
from expertd.service.grpc.infer_request import MessageHead, split
from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.statuses import Refusal, code_of
from expertd.service.grpc.tables import SERVICE
from expertd.service.grpc.wire import tag
from expertd.service.inference.admission import RequestAdmission, client_gone
from expertd.service.inference.body import InferBody, Received
from expertd.service.inference.call import InferCall
from expertd.service.inference.endpoint import InferEndpoint
from expertd.service.inference.errors import RequestError
from expertd.service.tracing import Rpc
from expertd.service.tracing.context import Headers

_INFER_RESPONSE = 2  # the number of that field of ModelStreamInferResponse
_MAX_KEPT = 256
_TRACE = ("traceparent", "tracestate")
_MAX_KEPT_BYTES = 2048  # of one head

Result = bytes | Refusal
"""A serialized ModelInferResponse, or why there is none."""


class Infer:
    """Answers messages through `endpoint`."""

    def __init__(self, endpoint: InferEndpoint) -> None:
        self._endpoint = endpoint
        self._heads: dict[tuple[object, ...], MessageHead] = {}

    def refusal_of_unknown(self, authorization: Headers) -> Refusal | None:
        """Why a caller is refused before its message is received: it has no key. None if it has one."""
        gate = self._endpoint.gate
        if gate.refresh() is None or gate.knows(authorization):
            return None
        admission = self._unnamed(authorization)
        try:
            admission.check()
        except RequestError as error:
            return cast(Refusal, admission.refuse_at_once(error))
        return None

    def refused(self, error: RequestError, authorization: Headers, context: Any) -> Refusal:
        """Why a call is refused whose message has not arrived."""
        admission = self._unnamed(authorization, self._rpc(context, "ModelInfer"))
        return cast(Refusal, admission.refuse_at_once(error))

    def left(self, authorization: Headers, context: Any, method: str = "ModelInfer") -> None:
        """Count a call that is cancelled before its message is read."""
        admission = self._unnamed(authorization, self._rpc(context, method))
        admission.refuse_at_once(_late(context) or client_gone())

    async def __call__(
        self, message: Arrived, authorization: Headers, context: Any, method: str = "ModelInfer"
    ) -> Result:
        """The answer to a serialized ModelInferRequest; cancelled, it leaves the request.

        `message` is freed once it is copied.
        """
        received_at, seconds = time.perf_counter(), context.time_remaining()
        caller, rpc = _RpcCaller(), self._rpc(context, method)
        try:
            head, tensors = self._read(message.take(), authorization)
        except RequestError as error:
            message.free()
            return cast(Refusal, self._unnamed(authorization, rpc).refuse_at_once(error))
        call = InferCall(self._endpoint, head, caller, self._endpoint.engine.arena, rpc)
        call.resume()
        if not call.is_refused:
            self._receive(call, head, tensors, received_at, seconds)
        del tensors  # which were copied
        message.free()
        try:
            return await caller.result
        except asyncio.CancelledError:
            if not caller.has_replied:  # else the request has ended, before this was resumed
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

    def _unnamed(self, authorization: Headers, rpc: Rpc | None = None) -> RequestAdmission:
        """Of a call that is refused or left before its request is read."""
        return RequestAdmission(self._endpoint, MessageHead(b"", (), authorization), rpc)

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

    def _read(self, data: bytes, authorization: Headers) -> tuple[MessageHead, list[memoryview]]:
        """The head of a message, kept for those like it, and its raw tensors. Raises RequestError."""
        rest, tensors = split(data)
        sizes = tuple(map(len, tensors))
        key = (rest, sizes, *authorization)
        head = self._heads.get(key)
        if head is None:
            head = MessageHead(rest, sizes, authorization)
            if len(rest) + sum(len(value) for _, value in authorization) <= _MAX_KEPT_BYTES:
                if len(self._heads) >= _MAX_KEPT:
                    self._heads.clear()
                self._heads[key] = head
        return head, tensors

    def _receive(
        self,
        call: InferCall,
        head: MessageHead,
        tensors: Sequence[memoryview],
        received_at: float,
        seconds: float | None,
    ) -> None:
        body: InferBody | None = None
        try:
            body = InferBody(self._endpoint.engine.arena, head.limit, head.tensor_bytes, None)
            for tensor in tensors:
                body.write(tensor)
            content = body.content()
        except Exception as error:
            if body is not None:
                body.release()
            call.resume(error)
        else:
            call.resume(Received(content, body, received_at, seconds))


class _RpcCaller:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.result: asyncio.Future[Result] = self.loop.create_future()
        self.has_replied = False

    def reply(self, call: InferCall, answer: Result) -> None:
        self.has_replied = True
        is_waiting = not self.result.done()
        if is_waiting:
            self.result.set_result(answer)
        call.sent(is_waiting)


def _code_name(status: int, reason: str | None) -> str:
    return str(code_of(status, reason).name)


def _late(context: Any) -> RequestError | None:
    """Why a call was cancelled: by its deadline, or None: by its client."""
    left = context.time_remaining()
    if left is None or left > 0:
        return None
    return RequestError("the call's deadline passed", reason="queue_timeout")
