"""An infer request: one coroutine from its body to its answer.

It has no task: what it waits for resumes it, because a task's overhead would be a part of every request.
Bodies stay where they arrived: tensors are views or spans of them. Work that grows with the body
(decompression, JSON tensors, validation of routing) runs in a thread if the body is large.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from typing import Any, Protocol, TypeVar

from expertd.service.engine.errors import EngineError, RegionsElsewhereError
from expertd.service.engine.metrics.requests import StageSeconds
from expertd.service.engine.spec import LayerSpec
from expertd.service.engine.steps import StepTimes, Submission
from expertd.service.inference.body import LARGE_BYTES, InferBody, Received, take
from expertd.service.inference.deadline import RequestDeadline
from expertd.service.inference.endpoint import InferEndpoint
from expertd.service.inference.errors import RequestError
from expertd.service.inference.head import InferHead
from expertd.service.inference.plan import RequestPlan
from expertd.service.inference.tensors import ELEMENT_BYTES, check_tokens
from expertd.service.inference.threads import Where, pause_for_others, thread_from
from expertd.service.memory import (
    Arena,
    Block,
    Buffer,
    RegionError,
    RegionUses,
    Span,
    host_view,
    is_for_device_alone,
    is_on_gpu,
)
from expertd.service.moe.request import LayerRequest, OutputMemory, fp8_rows
from expertd.service.moe.step.stages import TimedStep
from expertd.service.tracing import Rpc, TraceContext, TracedRequest, Tracing, trace_context
from expertd.service.tracing.context import Headers
from expertd.service.util.logs import with_fields
from expertd.service.util.sentences import shortened, shown

logger = logging.getLogger(__name__)

T = TypeVar("T")

_BEFORE_QUEUE = "before it was queued"
_BEFORE_ANSWER = "before its answer was ready"
_NOTHING = Received(b"", None)


class Caller(Protocol):
    """Who asked."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def reply(self, call: "InferCall", answer: Any) -> None:
        """Send `answer`, then call `call.sent`; None: the request has ended, and nobody waits for it."""


class InferCall:
    """One infer request: `admit`, then `receive`, or at any time `refuse` or `leave`; `caller.reply` ends it.

    arena  where large outputs are written; None: to memory of the runner's own
    rpc    the gRPC call that it came in; None: over HTTP
    """

    __slots__ = (
        "_arena",
        "_caller",
        "_caller_number",
        "_deadline",
        "_endpoint",
        "_forwarding",
        "_head",
        "_is_overdue",
        "_is_responding",
        "_key_name",
        "_layer",
        "_left",
        "_life",
        "_output",
        "_pending",
        "_plan",
        "_received",
        "_refusal",
        "_regions",
        "_rpc",
        "_sampled",
        "_spec",
        "_stages",
        "_started",
        "_timed",
        "_times",
        "_trace_context",
        "_working",
    )

    def __init__(
        self,
        endpoint: InferEndpoint,
        head: InferHead,
        caller: Caller,
        arena: Arena | None = None,
        rpc: Rpc | None = None,
    ) -> None:
        self._started = time.perf_counter()
        self._endpoint = endpoint
        self._head = head  # shared with other requests: what follows is of this one, once it is admitted
        self._key_name, self._caller_number = "", 0
        self._caller = caller
        self._arena = arena
        self._received = _NOTHING
        self._regions: RegionUses | None = None
        self._output: Block | None = None
        self._plan: RequestPlan | None = None
        self._pending: Any = None  # what the engine's `submit` returned, until its answer
        self._rpc = rpc
        self._stages: StageSeconds | None = None
        self._times: StepTimes | None = None  # for spans and the log
        self._sampled: bool | None = None  # for spans, as the next two; None: not decided yet
        self._trace_context: TraceContext | None = None
        self._timed: list[TimedStep] | None = None
        self._forwarding: asyncio.Future[Any] | None = None
        self._life: Coroutine[Any, Any, Any] | None = None  # from the whole body on
        self._deadline: RequestDeadline | None = None  # of a request with a timeout, once that is known
        self._left: RequestError | None = None
        self._refusal: RequestError | None = None
        self._working = False  # in a thread
        self._is_responding = False  # there: its output is stored or encoded
        self._is_overdue = False  # answered, while a step or a thread still uses its memory

    def admit(self) -> bool:
        """Check all that is known before the body; False if the request is refused."""
        head, engine = self._head, self._endpoint.engine
        try:
            self._endpoint.gate.admit_infer(head)
            self._key_name, self._caller_number = head.key_name, head.caller
            self._spec: LayerSpec = engine.model(head.model, head.version)
            engine.check_loaded(head.model)
            engine.check_capacity(head.model, caller=head.caller)  # first: one that drains refuses all sizes
            head.read(engine.settings.limits)
            if (num_tokens := head.min_tokens(self._spec)) > 1:
                check_tokens(num_tokens, self._spec, at_least="at least ")
                engine.check_capacity(head.model, num_tokens, head.caller)
            if head.has_large_text:
                self._endpoint.threads.check_json(engine.settings.limits, head.caller)
        except Exception as error:
            self.refuse(error)
            return False
        return True

    def receive(
        self,
        content: Buffer | Span,
        body: InferBody | None = None,
        received_at: float | None = None,
        call_seconds: float | None = None,
    ) -> None:
        """Compute the answer to the whole body, as for `Received`.

        received_at   when it was complete, by time.perf_counter; None: now
        call_seconds  what the call's own deadline left then; None: it has none
        """
        self._received = Received(content, body)
        self._life = self._answer(time.perf_counter() if received_at is None else received_at, call_seconds)
        self._resume()

    def _resume(self, result: Any = None) -> None:
        """Go on with the result of what the request waits for, up to where it waits again, or its reply."""
        life = self._life
        assert life is not None
        if self._is_overdue:
            life.close()
            self._release()
            return
        try:
            if self._left is None:
                life.send(result)
            else:
                life.throw(self._left)
            return
        except StopIteration as end:
            answer = end.value
        except asyncio.CancelledError:  # the server was stopped meanwhile
            answer = None
        except Exception as error:
            self.refuse(error)
            return
        self._caller.reply(self, answer)

    async def _answer(self, received_at: float, call_seconds: float | None) -> Any:
        head, received = self._head, self._received
        plan = self._plan = head.find(received.content)
        if plan is None:
            try:
                await self._run(head.where_to_parse(received), self._parse, parses=True)
            except RegionsElsewhereError:
                return await self._forward()
            plan = self._plan
            assert plan is not None
        deadline: RequestDeadline | None = None
        if plan.request.timeout_seconds is not None or call_seconds is not None:
            deadline = self._deadline = self._new_deadline(plan, received_at, call_seconds)
        output = plan.output
        size = plan.num_tokens * self._spec.hidden_size * ELEMENT_BYTES[plan.output_datatype]
        if output is None and size >= LARGE_BYTES and self._arena is not None:
            self._output = take(self._arena, size)
            output = self._output.span
        layer = self._layer = plan.layer(received.content, output)
        if self._regions is not None:
            await self._run(thread_from(self._regions.load_bytes), self._regions.load)
        if layer.scales is not None and self._joins_scales(layer):
            await self._run(thread_from(len(host_view(layer.hidden_states))), self._join)
        # Routing in a GPU's memory is not validated: an id outside the range names no expert.
        if layer.topk_ids is not None and not is_on_gpu(layer.topk_ids):
            await self._run(thread_from(16 * len(host_view(layer.topk_ids))), self._validate)
        computed: OutputMemory = b""
        if layer.num_tokens:  # expert-parallel callers send empty batches
            self._pending = self._endpoint.engine.submit(self._submission(plan))
            try:
                done = await _RESUMED
            finally:
                self._note_stages()
            if isinstance(done, Exception):
                raise done
            computed = done
        if deadline is not None:
            self._check_late(deadline)
        if computed is layer.output:
            received.release()
        answer = head.kept_answer(plan, computed)
        if answer is None:
            self._is_responding = True
            where = head.where_to_answer(plan, self._spec)
            if where is Where.EVENT_LOOP and self._regions is not None:
                where = thread_from(self._regions.store_bytes)
            answer = await self._run(where, partial(self._respond, computed, where))
        if deadline is not None:
            self._check_late(deadline)
            deadline.cancel()
        return answer

    # The stages of an answer.

    def _parse(self) -> None:
        engine = self._endpoint.engine
        self._plan = self._head.parse(self._received, self._spec, self._arena, engine.region_uses)
        self._regions = self._plan.request.regions

    def _new_deadline(
        self, plan: RequestPlan, received_at: float, call_seconds: float | None
    ) -> RequestDeadline:
        """The earlier one of the request's own and the call's."""
        seconds, name = plan.request.timeout_seconds, "timeout"
        if call_seconds is not None and (seconds is None or call_seconds < seconds):
            seconds, name = call_seconds, "deadline"
        assert seconds is not None
        return RequestDeadline(seconds, received_at, self._caller.loop, self._expire, name)

    @staticmethod
    def _joins_scales(layer: LayerRequest) -> bool:
        tensors = layer.hidden_states, layer.scales
        return layer.num_tokens > 0 and not any(map(is_for_device_alone, tensors))

    def _join(self) -> None:
        """Have FP8 values and their scales in the same rows."""
        layer = self._layer
        assert layer.scales is not None
        layer.hidden_states = fp8_rows(layer.hidden_states, layer.scales, layer.num_tokens)
        layer.scales = None

    def _validate(self) -> None:
        try:
            self._endpoint.engine.validate(self._head.model, self._layer)
        except ValueError as error:
            raise RequestError(str(error)) from error

    def _submission(self, plan: RequestPlan) -> Submission:
        """What the engine computes, to resume the request with its output."""
        endpoint, layer = self._endpoint, self._layer
        if (tracing := endpoint.tracing) is not None and self._is_sampled(tracing):
            layer.timed = self._timed = []
        left = None
        if self._deadline is not None and (left := self._deadline.left) <= 0:
            raise self._deadline.error(_BEFORE_QUEUE)
        return Submission(
            self._head.model,
            layer,
            self._resume,
            alone=endpoint.is_alone(self._caller),
            priority=plan.request.priority,
            caller=self._caller_number,
            timeout=left,
        )

    def _note_stages(self) -> None:
        """Keep where its time went, up to the engine's answer."""
        if self._endpoint.tracing is not None or self._endpoint.logs_requests:
            self._note_times()
        pending, self._pending = self._pending, None
        if pending is not None and pending.began is not None:
            waited = pending.began - pending.arrived
            self._stages = pending.arrived - self._started, waited, pending.compute_seconds

    def _respond(self, output: OutputMemory, where: Where) -> Any:
        assert self._plan is not None
        if self._regions is not None:
            self._regions.store(output)
        pause = pause_for_others if where is Where.JSON_THREAD else _no_pause
        return self._head.answer(self._plan, output, self._spec, pause)

    async def _forward(self) -> Any:
        """The answer of the engine's process."""
        forward = self._endpoint.forward
        assert forward is not None
        content = bytes(host_view(self._received.content))
        self._received.release()
        self._forwarding = asyncio.ensure_future(forward(self._head, self._key_name, content))
        try:
            return await self._result(self._forwarding)
        except Exception:
            if self._left is None:
                self._forwarding = None  # the engine has not counted it
            raise

    def _expire(self) -> None:
        """The request's timeout has passed; a step or a thread that has begun is not waited for.

        Except where it writes to a region: callers may use regions once they are answered.
        """
        assert self._deadline is not None
        if self._left is not None:
            return
        if (pending := self._pending) is not None:
            error = self._deadline.error("in the queue" if pending.began is None else "in its step")
            self._endpoint.engine.cancel(pending, error)
            if self._pending is not None and not self._device_writes_to_region:
                self.refuse_before_its_end(error)
        elif not self._is_responding:
            self.refuse_before_its_end(self._deadline.error(_BEFORE_QUEUE))
        elif self._regions is None or not self._regions.store_bytes:
            self.refuse_before_its_end(self._deadline.error(_BEFORE_ANSWER))

    @property
    def _device_writes_to_region(self) -> bool:
        """Whether the output is in a caller's region when it is computed: then it is of use even if late."""
        return self._plan is not None and self._plan.output is not None

    def _check_late(self, deadline: RequestDeadline) -> None:
        """Refuse the request if its output comes after its deadline."""
        if deadline.left <= 0 and not self._device_writes_to_region:
            raise deadline.error(_BEFORE_ANSWER)

    # Its ends.

    async def _run(self, where: Where, work: Callable[[], T], parses: bool = False) -> T:
        """The result of `work`, done there; not at all if the caller leaves or is answered before.

        parses  it is the request's JSON that large JSON is, whose line has a limit
        """
        if where is Where.EVENT_LOOP:
            return work()
        threads, loop, work = self._endpoint.threads, self._caller.loop, partial(self._work, work)
        if parses and where is Where.JSON_THREAD:
            done = threads.parse(loop, work, self._endpoint.engine.settings.limits, self._caller_number)
        else:
            done = threads.run(where, loop, work)
        self._working = True
        try:
            return await self._result(done)
        finally:
            self._working = False

    async def _result(self, future: "asyncio.Future[T]") -> T:
        future.add_done_callback(self._done)
        await _RESUMED
        return future.result()

    def _done(self, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled():
            future.exception()  # else asyncio logs that nobody has asked for it
        self._resume()

    def _work(self, work: Callable[[], T]) -> T:
        if self._left is not None:
            raise self._left
        if self._is_overdue:
            raise client_gone()  # nobody sees it
        return work()

    def refuse(self, error: Exception) -> None:
        """Answer with `error`."""
        if self._deadline is not None:
            self._deadline.cancel()
        refusal = self._refusal = self._left or self._refusal_of(error)
        _forget_frames(refusal)
        self._release()
        if self._left is None:
            self._caller.reply(self, self._answer_to(refusal))
        else:
            self._count()
            self._caller.reply(self, None)

    def refuse_before_its_end(self, error: Exception) -> None:
        """Answer with `error` while a step or a thread uses the request: its memory is given back later."""
        self._is_overdue = True
        refusal = self._refusal = self._refusal_of(error)
        self._caller.reply(self, self._answer_to(refusal))

    def leave(self, error: RequestError | None = None) -> None:
        """Nobody is left to answer: the client disconnected, or its body was refused with `error`."""
        self._left = left = error or client_gone()
        if self._is_overdue:  # and the answer is not sent
            self.sent(False)
        elif self._pending is not None:
            self._endpoint.engine.cancel(self._pending, left)
        elif self._forwarding is not None:
            self._forwarding.cancel()
        elif not self._working:
            self.refuse(left)

    def sent(self, delivered: bool) -> None:
        """The answer was sent; or not, because the client had disconnected."""
        if not delivered:
            self._refusal = client_gone()
        if not self._is_overdue:
            self._release()
        self._count()

    def _answer_to(self, refusal: RequestError) -> Any:
        return self._head.refusal(refusal, self._endpoint.status_of(refusal.reason))

    def _refusal_of(self, error: Exception) -> RequestError:
        refusal = _refusal_of(error, self._head.model)
        refusal.request_id = self._id_of(refusal)
        _forget_frames(refusal)
        return refusal

    def _release(self) -> None:
        """Give back the memory of the body, of the output, and of regions."""
        regions, self._regions = self._regions, None
        if regions is not None:
            regions.release()
        self._received.release()
        if self._output is not None:
            self._output.release()

    def _count(self) -> None:
        if self._forwarding is not None:
            return  # the engine's process does
        endpoint, model, refusal = self._endpoint, self._head.model, self._refusal
        known = model if model in endpoint.engine.models else ""
        reason = None
        if refusal is not None:
            self._stages, reason = None, refusal.reason
            what = (self._status, reason, shown(model), shown(refusal.request_id), refusal.message)
            logger.debug("%d %s: model %s, id %s: %s", *what)
        seconds = time.perf_counter() - self._started
        endpoint.metrics.request_done(known, reason, seconds, self._stages)
        if endpoint.logs_requests:
            self._log(refusal, seconds)
        if (tracing := endpoint.tracing) is not None:
            self._trace(tracing, refusal, seconds)

    @property
    def _status(self) -> int:
        """What logs and spans call how it ended."""
        return self._endpoint.status_of(None if self._refusal is None else self._refusal.reason)

    @property
    def _metadata(self) -> Headers:
        """Where the caller's trace context is."""
        return self._head.headers if self._rpc is None else self._rpc.headers

    def _id_of(self, refusal: RequestError | None) -> str | None:
        """The caller's own id of the request, as far as it is known."""
        if refusal is not None and refusal.request_id is not None:
            return refusal.request_id
        return self._head.request_id if self._plan is None else self._plan.request.id

    def _note_times(self) -> None:
        """Keep when the engine had the request."""
        if self._pending is not None:
            self._times = self._pending.times(time.perf_counter())

    def _remote_stages(self) -> StageSeconds | None:
        """As `_stages`, of a request that was computed in the engine's process."""
        times = self._times
        if self._refusal is not None or times is None or times.began is None:
            return None
        return times.arrived - self._started, times.began - times.arrived, times.ended - times.began

    def _is_sampled(self, tracing: Tracing) -> bool:
        """Whether the request has spans; decided once: before its step, if it has one."""
        if self._sampled is None:
            self._trace_context = trace_context(self._metadata)
            self._sampled = tracing.samples(self._trace_context)
        return self._sampled

    def _trace(self, tracing: Tracing, refusal: RequestError | None, seconds: float) -> None:
        """Have spans of the request made, if it is sampled."""
        if not self._is_sampled(tracing):
            return
        if self._times is None:  # it is answered while a step still uses its memory
            self._note_times()
        tracing.add(
            TracedRequest(
                started=self._started,
                ended=self._started + seconds,
                context=self._trace_context,
                times=self._times,
                rpc=self._rpc,
                headers=self._head.headers,
                is_tls=self._endpoint.engine.settings.tls.is_on,
                model=shortened(self._head.model),
                request_id=self._id_of(refusal),
                tokens=None if self._plan is None else self._plan.num_tokens,
                status=self._status,
                reason=None if refusal is None else refusal.reason,
                timed=() if self._timed is None else self._timed,
            )
        )

    def _log(self, refusal: RequestError | None, seconds: float) -> None:
        """The line of the request."""
        head, plan, status, trace = self._head, self._plan, self._status, trace_context(self._metadata)
        receive, queue, compute = self._stages or self._remote_stages() or (None, None, None)
        fields = with_fields(
            model=shortened(head.model),
            status=status,
            reason=None if refusal is None else refusal.reason,
            error=None if refusal is None else refusal.message,
            request_id=self._id_of(refusal),
            key=self._key_name or None,
            tokens=None if plan is None else plan.num_tokens,
            seconds=round(seconds, 6),
            receive_seconds=receive and round(receive, 6),
            queue_seconds=queue and round(queue, 6),
            compute_seconds=compute and round(compute, 6),
            trace_id=None if trace is None else trace.trace_id,
            parent_span_id=None if trace is None else trace.span_id,
        )
        logger.info("infer %d", status, extra=fields)


def _refusal_of(error: Exception, model: str) -> RequestError:
    """`error` as a refusal; unexpected ones are logged."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineError):
        refusal = RequestError(str(error), reason=error.reason, retry_after=error.retry_after)
    elif isinstance(error, RegionError):
        refusal = RequestError(str(error))
    else:
        logger.error("an infer request to model %s failed", shown(model), exc_info=error)
        refusal = RequestError("internal server error: see the server's log", reason="internal_error")
    refusal.__cause__ = error
    return refusal


def client_gone() -> RequestError:
    """The outcome of a request that nobody waits for any more."""
    return RequestError("the client closed the connection", reason="client_gone")


def _forget_frames(error: BaseException | None) -> None:
    """They refer to the request, whose memory would else wait for the garbage collector."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class _Resumed:
    """Awaited, it waits, and gives what the request is resumed with."""

    def __await__(self) -> Generator[None, Any, Any]:
        return (yield)


_RESUMED = _Resumed()


def _no_pause() -> None:
    """On the event loop."""
