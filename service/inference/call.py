"""An infer request: one coroutine from its head to its end.

It has no task: what it waits for resumes it, because a task's overhead would be a part of every request.
Bodies stay where they arrived: tensors are views or spans of them. Work that grows with the body
(decompression, JSON tensors, validation of routing) runs in a thread if the body is large.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any, Protocol, TypeVar

from expertd.service.engine.errors import RegionsElsewhereError
from expertd.service.engine.spec import LayerSpec
from expertd.service.engine.steps import Submission
from expertd.service.inference.admission import RequestAdmission, client_gone
from expertd.service.inference.body import LARGE_BYTES, Received, take
from expertd.service.inference.deadline import RequestDeadline
from expertd.service.inference.endpoint import InferEndpoint
from expertd.service.inference.errors import RequestError
from expertd.service.inference.head import InferHead
from expertd.service.inference.plan import RequestPlan
from expertd.service.inference.tensors import ELEMENT_BYTES
from expertd.service.inference.threads import Where, pause_for_others, thread_from
from expertd.service.memory import Arena, Block, RegionUses, Span, host_view, is_for_device_alone, is_on_gpu
from expertd.service.moe.request import LayerRequest, OutputMemory, fp8_rows
from expertd.service.tracing import Rpc

T = TypeVar("T")

_BEFORE_QUEUE = "before it was queued"
_BEFORE_ANSWER = "before its answer was ready"


@coroutine
def _resumed() -> Generator[None, Any, Any]:
    """Wait, and give what the request is resumed with; raise it if it is an error."""
    result = yield
    if isinstance(result, Exception):
        raise result
    return result


@coroutine
def _sent(answer: Any) -> Generator[Any, bool, bool]:
    """Have `resume` send the answer, and wait until that is done; whether somebody was there to read it."""
    return (yield answer)


class Caller(Protocol):
    """Who asked."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def reply(self, call: "InferCall", answer: Any) -> None:
        """Send `answer`, then call `call.sent`."""


class InferCall:
    """One infer request: `resume` begins it, and gives it its body, or an error instead; `leave` at any time.

    `caller.reply` is given its answer, also that of a refusal, unless it was left.

    arena     where large outputs are written; None: to memory of the runner's own
    rpc       the gRPC call that it came in; None: over HTTP
    received  its whole body, if that is here when it begins
    """

    __slots__ = (
        "_admission",
        "_arena",
        "_caller",
        "_deadline",
        "_endpoint",
        "_forwarding",
        "_head",
        "_is_overdue",
        "_is_responding",
        "_left",
        "_life",
        "_output",
        "_pending",
        "_received",
        "_regions",
        "_spec",
        "_working",
    )

    def __init__(
        self,
        endpoint: InferEndpoint,
        head: InferHead,
        caller: Caller,
        arena: Arena | None = None,
        rpc: Rpc | None = None,
        received: Received | None = None,
    ) -> None:
        self._admission = RequestAdmission(endpoint, head, rpc)
        self._endpoint = endpoint
        self._head = head
        self._caller = caller
        self._arena = arena
        self._received = received
        self._regions: RegionUses | None = None
        self._output: Block | None = None
        self._deadline: RequestDeadline | None = None  # of a request with a timeout, once that is known
        self._pending: Any = None  # what the engine's `submit` returned, until its answer
        self._forwarding: asyncio.Future[Any] | None = None
        self._left: RequestError | None = None
        self._working = False  # in a thread
        self._is_responding = False  # there: its output is stored or encoded
        self._is_overdue = False  # answered, while a step or a thread still uses its memory
        self._life: Coroutine[Any, Any, None] = self._infer()

    @property
    def is_refused(self) -> bool:
        """Whether it is answered with an error: once it has begun, its body is not received then."""
        return self._admission.is_refused

    def resume(self, result: Any = None) -> None:
        """Begin, or go on with what the request waits for, up to where it waits again, or ends.

        result  that, or the error that comes instead; first of all the body, as `Received`
        """
        if self._is_overdue:
            self._life.close()
            return
        try:
            answer = self._life.send(self._left or result)
        except (StopIteration, asyncio.CancelledError):  # it has ended; or the server was stopped meanwhile
            return
        if answer is not None:
            self._caller.reply(self, answer)

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
            self.resume()

    def sent(self, delivered: bool) -> None:
        """The answer was sent; or not, because the client had disconnected."""
        if self._is_overdue:
            self._admission.end(delivered)
        else:
            self.resume(delivered)

    async def _infer(self) -> None:
        """The request from its head to its end."""
        admission, head = self._admission, self._head
        try:
            try:
                self._spec: LayerSpec = admission.check()
                received = self._received = self._received or await _resumed()
                plan = head.find(received.content)
                if plan is None:
                    plan = await self._run(head.where_to_parse(received), self._parse, parses=True)
                admission.plan = plan
                deadline: RequestDeadline | None = None
                if plan.request.timeout_seconds is not None or received.call_seconds is not None:
                    deadline = self._deadline = self._deadline_of(plan, received)
                layer = plan.layer(received.content, self._place_for_output(plan))
                await self._prepare(layer)
                computed: OutputMemory = b""
                if layer.num_tokens:  # expert-parallel callers send empty batches
                    self._pending = self._endpoint.engine.submit(self._submission(plan, layer))
                    try:
                        computed = await _resumed()
                    finally:
                        pending, self._pending = self._pending, None
                        admission.note_times(pending)
                if deadline is not None:
                    self._check_late(deadline)
                if computed is layer.output:
                    received.release()
                answer = head.kept_answer(plan, computed)
                if answer is None:
                    answer = await self._written(plan, computed)
                if deadline is not None:
                    self._check_late(deadline)
            except RegionsElsewhereError:
                answer = await self._forward()
            except Exception as error:
                answer = self._refused(error)
            if self._deadline is not None:  # an answer is sent once
                self._deadline.cancel()
            delivered = self._left is not None or await _sent(answer)
        finally:
            self._release()
        if self._forwarding is None:  # else the engine's process counts it
            admission.end(delivered)

    # What it waits for, in this order.

    def _parse(self) -> RequestPlan:
        assert self._received is not None
        plan = self._head.parse(self._received, self._spec, self._arena, self._endpoint.engine.region_uses)
        self._regions = plan.request.regions
        return plan

    async def _prepare(self, layer: LayerRequest) -> None:
        """Load regions, have FP8 values and their scales in the same rows, validate the routing."""
        if self._regions is not None:
            await self._run(thread_from(self._regions.load_bytes), self._regions.load)
        if layer.scales is not None and _joins_scales(layer):
            await self._run(thread_from(len(host_view(layer.hidden_states))), partial(_join_scales, layer))
        # Routing in a GPU's memory is not validated: an id outside the range names no expert.
        if layer.topk_ids is not None and not is_on_gpu(layer.topk_ids):
            where = thread_from(16 * len(host_view(layer.topk_ids)))
            await self._run(where, partial(self._validate, layer))

    def _validate(self, layer: LayerRequest) -> None:
        try:
            self._endpoint.engine.validate(self._head.model, layer)
        except ValueError as error:
            raise RequestError(str(error)) from error

    async def _written(self, plan: RequestPlan, output: OutputMemory) -> Any:
        """The answer, with the output where the caller wants it."""
        self._is_responding = True
        where = self._head.where_to_answer(plan, self._spec)
        if where is Where.EVENT_LOOP and self._regions is not None:
            where = thread_from(self._regions.store_bytes)
        pause = pause_for_others if where is Where.JSON_THREAD else _no_pause
        return await self._run(where, partial(self._write, plan, output, pause))

    def _write(self, plan: RequestPlan, output: OutputMemory, pause: Callable[[], object]) -> Any:
        if self._regions is not None:
            self._regions.store(output)
        return self._head.answer(plan, output, self._spec, pause)

    async def _forward(self) -> Any:
        """The answer of the engine's process."""
        forward, received = self._endpoint.forward, self._received
        assert forward is not None
        assert received is not None
        content = bytes(host_view(received.content))
        received.release()
        self._forwarding = asyncio.ensure_future(forward(self._head, self._admission.key_name, content))
        try:
            return await self._result(self._forwarding)
        except Exception as error:
            if self._left is None:
                self._forwarding = None  # the engine has not counted it
            return self._refused(error)

    # Memory.

    def _place_for_output(self, plan: RequestPlan) -> Span | None:
        """In a caller's region, or in the arena; None: it is small, or there is no arena."""
        if plan.output is not None:
            return plan.output
        size = plan.num_tokens * self._spec.hidden_size * ELEMENT_BYTES[plan.output_datatype]
        if size < LARGE_BYTES or self._arena is None:
            return None
        self._output = take(self._arena, size)
        return self._output.span

    def _release(self) -> None:
        """Give back the memory of the body, of the output, and of regions."""
        regions, self._regions = self._regions, None
        if regions is not None:
            regions.release()
        if self._received is not None:
            self._received.release()
        if self._output is not None:
            self._output.release()

    # The engine.

    def _submission(self, plan: RequestPlan, layer: LayerRequest) -> Submission:
        """What the engine computes, to resume the request with its output."""
        endpoint, admission = self._endpoint, self._admission
        if (tracing := endpoint.tracing) is not None and admission.is_sampled(tracing):
            layer.timed = admission.timed = []
        left = None
        if self._deadline is not None and (left := self._deadline.left) <= 0:
            raise self._deadline.error(_BEFORE_QUEUE)
        return Submission(
            self._head.model,
            layer,
            self.resume,
            alone=endpoint.is_alone(self._caller),
            priority=plan.request.priority,
            caller=admission.caller,
            timeout=left,
        )

    # Threads.

    async def _run(self, where: Where, work: Callable[[], T], parses: bool = False) -> T:
        """The result of `work`, done there; not at all if the caller leaves or is answered before.

        parses  it is the request's JSON that large JSON is, whose line has a limit
        """
        if where is Where.EVENT_LOOP:
            return work()
        threads, loop, work = self._endpoint.threads, self._caller.loop, partial(self._work, work)
        if parses and where is Where.JSON_THREAD:
            done = threads.parse(loop, work, self._endpoint.engine.settings.limits, self._admission.caller)
        else:
            done = threads.run(where, loop, work)
        self._working = True
        try:
            return await self._result(done)
        finally:
            self._working = False

    async def _result(self, future: "asyncio.Future[T]") -> T:
        future.add_done_callback(self._done)
        await _resumed()
        return future.result()

    def _done(self, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled():
            future.exception()  # else asyncio logs that nobody has asked for it
        self.resume()

    def _work(self, work: Callable[[], T]) -> T:
        if self._left is not None:
            raise self._left
        if self._is_overdue:
            raise client_gone()  # nobody sees it
        return work()

    # Refusals, and the deadline.

    def _refused(self, error: Exception) -> Any:
        """The answer of a request that fails with `error`, which needs its memory no more."""
        self._release()
        return self._admission.refuse(self._left or error)

    def _deadline_of(self, plan: RequestPlan, received: Received) -> RequestDeadline:
        """The earlier one of the request's own and the call's."""
        seconds, name = plan.request.timeout_seconds, "timeout"
        if received.call_seconds is not None and (seconds is None or received.call_seconds < seconds):
            seconds, name = received.call_seconds, "deadline"
        assert seconds is not None
        return RequestDeadline(seconds, received.at, self._caller.loop, self._expire, name)

    def _check_late(self, deadline: RequestDeadline) -> None:
        """Refuse the request if its output comes after its deadline."""
        if deadline.left <= 0 and not self._device_writes_to_region:
            raise deadline.error(_BEFORE_ANSWER)

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
                self._admission.note_times(pending)
                self._refuse_before_its_end(error)
        elif not self._is_responding:
            self._refuse_before_its_end(self._deadline.error(_BEFORE_QUEUE))
        elif self._regions is None or not self._regions.store_bytes:
            self._refuse_before_its_end(self._deadline.error(_BEFORE_ANSWER))

    @property
    def _device_writes_to_region(self) -> bool:
        """Whether the output is in a caller's region when it is computed: then it is of use even if late."""
        plan = self._admission.plan
        return plan is not None and plan.output is not None

    def _refuse_before_its_end(self, error: Exception) -> None:
        """Answer with `error` while a step or a thread uses the request: its memory is given back later."""
        self._is_overdue = True
        self._caller.reply(self, self._admission.refuse(error))


def _joins_scales(layer: LayerRequest) -> bool:
    tensors = layer.hidden_states, layer.scales
    return layer.num_tokens > 0 and not any(map(is_for_device_alone, tensors))


def _join_scales(layer: LayerRequest) -> None:
    """Have FP8 values and their scales in the same rows."""
    assert layer.scales is not None
    layer.hidden_states = fp8_rows(layer.hidden_states, layer.scales, layer.num_tokens)
    layer.scales = None


def _no_pause() -> None:
    """On the event loop."""
