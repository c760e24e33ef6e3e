"""POST /v2/models/{name}/infer as a bare ASGI endpoint, because its overhead is part of every request.

Bodies stay bytes: they are read once, requests hold views of them, and outputs are sent as the step returns
them. Work that grows with the body (decompression, JSON tensors, validation of routing) runs in a thread if
the body is large.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.types import Message, Receive, Scope, Send

from expertd.service.engine.batching import Pending
from expertd.service.engine.engine import Engine
from expertd.service.engine.errors import EngineError, NotReadyError, QueueTimeoutError
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.spec import MODEL_VERSION
from expertd.service.http.bodies import BodyReader, ClientGoneError, number_of_bytes
from expertd.service.http.delivery import aborted_request, delivery
from expertd.service.http.errors import http_error
from expertd.service.http.protocol import (
    InferRequest,
    InferResponse,
    OipError,
    build_response,
    compress,
    decompress,
    parse_request,
    requested_encoding,
)
from expertd.service.memory import RegionError, host_view, is_on_gpu
from expertd.service.moe.request import Output
from expertd.service.sentences import shown

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Below this many bytes a thread hop costs more than the work.
_INLINE_BYTES = 64 * 1024
# Requests that wait for less than this get no task that watches for a disconnect.
_WATCH_AFTER_SECONDS = 0.05
_HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(slots=True)
class _Headers:
    content_length: int | None = None
    header_length: int | None = None
    content_encoding: str | None = None
    accept_encoding: str = ""


@dataclass(slots=True)
class _Answer:
    status: int
    parts: list[bytes | memoryview]
    content_type: bytes = b"application/json"
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)


class InferEndpoint:
    """Answers infer requests with the layer's output or an error."""

    def __init__(self, engine: Engine, metrics: Metrics, bodies: BodyReader) -> None:
        self._engine = engine
        self._bodies = bodies
        self._metrics = metrics
        self._max_body_bytes = engine.settings.limits.max_body_bytes
        self._max_json_bytes = engine.settings.limits.max_json_bytes

    async def __call__(
        self, scope: Scope, receive: Receive, send: Send, model: str, version: str = MODEL_VERSION
    ) -> None:
        """Answer one request for `model`, which may not exist."""
        started = time.perf_counter()
        known = model if model in self._engine.models else ""
        refusal: OipError | None = None
        try:
            answer = await self._answer(scope, receive, model, version)
        except Exception as error:
            refusal = _refusal(error, model, scope)
            answer = _error(refusal, scope)
        if refusal is None or not isinstance(refusal.__cause__, ClientGoneError):
            await self._send(send, answer)
            connection = delivery(scope)
            if connection is not None and not connection.sent and not await connection.delivered():
                refusal = _refusal(ClientGoneError(), model, scope)
        status = answer.status
        if refusal is not None:
            status = refusal.status
            self._metrics.refused(known, refusal.reason)
            _log(refusal, model)
        self._metrics.request_done(known, status, time.perf_counter() - started)

    async def _answer(self, scope: Scope, receive: Receive, model: str, version: str) -> _Answer:
        spec = self._engine.model(model, version)
        if self._engine.loaded is None:
            raise NotReadyError(f"model {model} is not ready: the server is {self._engine.phase.value}")
        headers = _read_headers(scope)
        # If the queue is full, refuse before reading the body.
        self._engine.scheduler.check_capacity(model)
        body = await self._bodies.read(receive, headers.content_length, self._max_body_bytes)
        if headers.content_encoding is not None:
            encoding, limit = headers.content_encoding, self._max_body_bytes
            body = await _off_loop(len(body), lambda: decompress(body, encoding, limit))
        json_bytes = len(body) if headers.header_length is None else min(headers.header_length, len(body))
        if json_bytes > self._max_json_bytes:
            limit = self._max_json_bytes
            text = f"JSON: expected at most {limit} bytes, got {json_bytes}; send tensors in binary"
            raise OipError(413, text, reason="json_too_large")
        new_uses = self._engine.shared_memory.uses
        request = await _off_loop(
            json_bytes, lambda: parse_request(body, headers.header_length, spec, new_uses)
        )
        regions = request.regions
        try:
            if regions is not None:
                await _off_loop(regions.load_bytes, regions.load)
            output = await self._compute(model, request, scope, receive)
            if regions is not None:
                await _off_loop(regions.store_bytes, lambda: regions.store(output))
            size = 8 * len(host_view(output)) if request.json_output else 0
            response = await _off_loop(size, lambda: build_response(request, output, spec))
        except Exception as error:
            refusal = _refusal(error, model, scope)
            refusal.request_id = request.id
            raise refusal from refusal.__cause__
        finally:
            if regions is not None:
                regions.release()
        return await _encoded(response, headers.accept_encoding)

    async def _compute(self, model: str, request: InferRequest, scope: Scope, receive: Receive) -> Output:
        layer = request.layer
        scheduler = self._engine.scheduler
        # Routing in a GPU's memory is not validated: an id outside the range names no expert.
        if layer.topk_ids is not None and not is_on_gpu(layer.topk_ids):
            runner = scheduler.runner(model)
            try:
                await _off_loop(16 * len(host_view(layer.topk_ids)), lambda: runner.validate(layer))
            except ValueError as error:
                raise OipError(400, str(error)) from error
        if layer.num_tokens == 0:
            return b""  # expert-parallel callers send empty batches
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Output] = loop.create_future()

        def done(output: Output | Exception) -> None:
            if request.regions is not None:
                request.regions.release()  # of the step: until now it might have used them
            if answer.cancelled():
                pass  # the handler was cancelled: nobody is waiting
            elif isinstance(output, Exception):
                answer.set_exception(output)
            else:
                answer.set_result(output)

        if request.regions is not None:
            request.regions.retain()
        try:
            pending = scheduler.submit(model, layer, done)
        except BaseException:
            if request.regions is not None:
                request.regions.release()
            raise
        timers = [loop.call_later(_WATCH_AFTER_SECONDS, self._watch, pending, answer, receive)]
        if (seconds := request.timeout_seconds) is not None:
            expired = QueueTimeoutError(f"the request's timeout of {seconds} s expired in the queue")
            timers.append(loop.call_later(seconds, scheduler.cancel, pending, expired))
        try:
            output = await answer
        finally:
            for timer in timers:
                timer.cancel()
        if _has_left(scope, receive):
            raise ClientGoneError
        return output

    def _watch(self, pending: Pending, answer: "asyncio.Future[Output]", receive: Receive) -> None:
        """Cancel a queued request as soon as its client disconnects."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._engine.scheduler.cancel(pending, ClientGoneError())

        task = asyncio.get_running_loop().create_task(watch())
        answer.add_done_callback(lambda _: task.cancel())

    async def _send(self, send: Send, answer: _Answer) -> None:
        parts = answer.parts
        length = sum(map(len, parts))
        headers = [
            (b"content-type", answer.content_type),
            (b"content-length", str(length).encode()),
            *answer.headers,
        ]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        if length <= _INLINE_BYTES:
            parts = [b"".join(parts)]
        for index, part in enumerate(parts, 1):
            message: Message = {"type": "http.response.body", "body": part, "more_body": index < len(parts)}
            await send(message)


def _read_headers(scope: Scope) -> _Headers:
    headers = _Headers()
    for name, value in scope["headers"]:
        if name == b"inference-header-content-length":
            headers.header_length = number_of_bytes(value, _HEADER_LENGTH, headers.header_length)
        elif name == b"content-length":
            headers.content_length = number_of_bytes(value, "Content-Length", headers.content_length)
        elif name == b"content-encoding":
            headers.content_encoding = _joined(headers.content_encoding, value)
        elif name == b"accept-encoding":
            headers.accept_encoding = _joined(headers.accept_encoding, value)
    return headers


def _joined(earlier: str | None, value: bytes) -> str:
    """Headers of the same name form one list (RFC 9110, 5.3)."""
    text = value.decode("latin-1")
    return f"{earlier}, {text}" if earlier else text


async def _off_loop(size: int, work: Callable[[], T]) -> T:
    """`work()`, in a thread if it processes many bytes (`size`)."""
    return work() if size <= _INLINE_BYTES else await asyncio.to_thread(work)


async def _encoded(response: InferResponse, accept_encoding: str) -> _Answer:
    answer = _Answer(200, response.parts)
    if response.header_length is not None:
        answer.content_type = b"application/octet-stream"
        answer.headers.append((b"inference-header-content-length", str(response.header_length).encode()))
    if encoding := requested_encoding(accept_encoding):
        size = sum(map(len, response.parts))
        answer.parts = [await _off_loop(size, lambda: compress(response.parts, encoding))]
        answer.headers.append((b"content-encoding", encoding.encode()))
    return answer


def _has_left(scope: Scope, receive: Receive) -> bool:
    """Whether the client has disconnected, as far as is known without waiting."""
    if (connection := delivery(scope)) is not None:
        return connection.gone
    receiving = receive().__await__()
    try:
        next(receiving)
    except StopIteration as stop:
        return bool(stop.value["type"] == "http.disconnect")
    receiving.close()  # it would block
    return False


def _refusal(error: Exception, model: str, scope: Scope) -> OipError:
    if isinstance(error, OipError):
        return error
    if isinstance(error, EngineError):
        return http_error(error)
    if isinstance(error, RegionError):
        return OipError(400, str(error))
    if isinstance(error, ClientGoneError):
        refusal = aborted_request(scope)
    else:
        logger.error("an infer request to model %s failed", shown(model), exc_info=error)
        refusal = OipError(500, "internal server error: see the server's log")
    refusal.__cause__ = error
    return refusal


def _log(refusal: OipError, model: str) -> None:
    what = (refusal.status, refusal.reason, shown(model), shown(refusal.request_id), refusal.message)
    logger.debug("%d %s: model %s, id %s: %s", *what)


def _error(error: OipError, scope: Scope) -> _Answer:
    headers = [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
    if any(name == b"expect" for name, _ in scope["headers"]):
        # The body may never arrive, and the next request must not be parsed as it.
        headers.append((b"connection", b"close"))
    return _Answer(error.status, [error.body()], headers=headers)
