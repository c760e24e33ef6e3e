"""POST /v2/models/{name}/infer: one function from a request's head and body to its answer.

It is written with callbacks, without a task for each request, because its overhead is part of every request.
Bodies stay where they arrived: tensors are views or spans of them. Work that grows with the body
(decompression, JSON tensors, validation of routing) runs in a thread if the body is large.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.answers import client_gone
from expertd.service.http.deadline import Deadline
from expertd.service.http.infer_body import LARGE_BYTES, InferBody, Received, take
from expertd.service.http.infer_ending import InferEnding
from expertd.service.http.infer_head import least_tokens
from expertd.service.http.threads import Where, pause_for_others, thread_from
from expertd.service.inference.errors import RequestError
from expertd.service.inference.tensors import ELEMENT_BYTES, check_tokens
from expertd.service.memory import Buffer, Span, host_view, is_for_device_alone, is_on_gpu
from expertd.service.moe.request import LayerRequest, Output, fp8_rows

T = TypeVar("T")

_BEFORE_QUEUE = "before it was queued"
_BEFORE_ANSWER = "before its answer was ready"


class InferCall(InferEnding):
    """One infer request: `admit`, then `receive`, or at any time `refuse` or `leave`; `caller.reply` ends it.

    arena  where large outputs are written; None: to memory of the runner's own
    """

    __slots__ = ("_call_seconds", "_layer", "_received_at", "_spec")

    def admit(self) -> bool:
        """Check all that is known before the body; False if the request is refused."""
        head, engine = self._head, self._endpoint.engine
        try:
            self._endpoint.gate.admit_infer(head)
            self._key_name, self._caller_number = head.key_name, head.caller
            self._spec: LayerSpec = engine.model(head.model, head.version)
            engine.check_loaded(head.model)
            engine.check_capacity(head.model, head.caller)  # first: one that shuts down refuses all sizes
            head.read(engine.settings.limits)
            if (least := least_tokens(head, self._spec)) > 1:
                check_tokens(least, self._spec, at_least="at least ")
                engine.check_capacity(head.model, head.caller, least)
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
        head = self._head
        self._call_seconds = call_seconds
        self._received_at = time.perf_counter() if received_at is None else received_at
        received = self._received = Received(content, body)
        try:
            if (plan := head.find(content)) is not None:
                self._plan = plan
                self._parsed(None)
                return
            self._run(head.where_to_parse(received), self._parse, self._parsed, parses=True)
        except Exception as error:
            self.refuse(error)

    # The stages of an answer. Whatever they raise is refused.

    def _parse(self) -> None:
        engine = self._endpoint.engine
        self._plan = self._head.parse(self._received, self._spec, self._arena, engine.region_uses)
        self._regions = self._plan.request.regions

    def _parsed(self, _: None) -> None:
        plan = self._plan
        assert plan is not None
        seconds, name = plan.request.timeout_seconds, "timeout"
        if self._call_seconds is not None and (seconds is None or self._call_seconds < seconds):
            seconds, name = self._call_seconds, "deadline"
        if seconds is not None:
            self._deadline = Deadline(seconds, self._received_at, self._caller.loop, self._expire, name)
        output = plan.output
        size = plan.num_tokens * self._spec.hidden_size * ELEMENT_BYTES[plan.output_datatype]
        if output is None and size >= LARGE_BYTES and self._arena is not None:
            self._output = take(self._arena, size)
            output = self._output.span
        self._layer: LayerRequest = plan.layer(self._received.content, output)
        if self._regions is None:
            self._loaded(None)
        else:
            self._run(thread_from(self._regions.load_bytes), self._regions.load, self._loaded)

    def _loaded(self, _: None) -> None:
        layer = self._layer
        tensors = layer.hidden_states, layer.scales
        if layer.scales is None or not layer.num_tokens or any(map(is_for_device_alone, tensors)):
            self._joined(None)
        else:
            self._run(thread_from(len(host_view(layer.hidden_states))), self._join, self._joined)

    def _join(self) -> None:
        """Have FP8 values and their scales in the same rows."""
        layer = self._layer
        assert layer.scales is not None
        layer.hidden_states = fp8_rows(layer.hidden_states, layer.scales, layer.num_tokens)
        layer.scales = None

    def _joined(self, _: None) -> None:
        ids = self._layer.topk_ids
        # Routing in a GPU's memory is not validated: an id outside the range names no expert.
        if ids is None or is_on_gpu(ids):
            self._submit(None)
        else:
            self._run(thread_from(16 * len(host_view(ids))), self._validate, self._submit)

    def _validate(self) -> None:
        try:
            self._endpoint.engine.validate(self._head.model, self._layer)
        except ValueError as error:
            raise RequestError(str(error)) from error

    def _submit(self, _: None) -> None:
        if self._layer.num_tokens == 0:
            self._computed(b"")  # expert-parallel callers send empty batches
            return
        assert self._plan is not None
        if (tracing := self._endpoint.tracing) is not None and self._is_sampled(tracing):
            self._layer.timed = self._timed = []
        engine = self._endpoint.engine
        alone = self._endpoint.is_alone(self._caller)
        priority = self._plan.request.priority
        model, caller = self._head.model, self._caller_number
        left = None
        if self._deadline is not None and (left := self._deadline.left) <= 0:
            raise self._deadline.error(_BEFORE_QUEUE)
        self._pending = engine.submit(model, self._layer, self._computed, alone, priority, caller, left)

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

    def _refused_as_late(self) -> bool:
        """Refuse the request if its output comes after its timeout; whether it did."""
        if self._deadline is None or self._deadline.left > 0 or self._device_writes_to_region:
            return False
        self.refuse(self._deadline.error(_BEFORE_ANSWER))
        return True

    def _computed(self, output: Output | Exception) -> None:
        """The scheduler's answer."""
        if self._endpoint.tracing is not None or self._endpoint.logs_requests:
            self._note_times()
        pending, self._pending = self._pending, None
        if pending is not None and pending.began is not None:
            waited = pending.began - pending.arrived
            self._stages = pending.arrived - self._started, waited, pending.compute_seconds
        if self._is_overdue:
            self._release()
            return
        if isinstance(output, Exception) or self._left is not None:
            self.refuse(output if isinstance(output, Exception) else client_gone())
            return
        if self._deadline is not None and self._refused_as_late():
            return
        plan = self._plan
        assert plan is not None
        if output is self._layer.output:
            self._received.release()
        if (answer := self._head.kept_answer(plan, output)) is not None:
            self._answer(answer)
            return
        self._is_responding = True
        try:
            where = self._head.where_to_answer(plan, self._spec)
            if where is Where.EVENT_LOOP and self._regions is not None:
                where = thread_from(self._regions.store_bytes)
            self._run(where, partial(self._respond, output, where), self._answer)
        except Exception as error:
            self.refuse(error)

    def _respond(self, output: Output, where: Where) -> Any:
        assert self._plan is not None
        if self._regions is not None:
            self._regions.store(output)
        pause = pause_for_others if where is Where.JSON_THREAD else _no_pause
        return self._head.answer(self._plan, output, self._spec, pause)

    def _answer(self, answer: Any) -> None:
        if self._deadline is not None:
            if self._refused_as_late():
                return
            self._deadline.cancel()
        self._caller.reply(self, answer)

    def _run(
        self, where: Where, work: Callable[[], T], then: Callable[[T], object], parses: bool = False
    ) -> None:
        """`then(work())`, with `work` done there; not at all if the caller leaves or is answered before.

        parses  it is the request's JSON that large JSON is, whose line has a limit
        """
        if where is Where.EVENT_LOOP:
            then(work())
            return
        threads, loop, work = self._endpoint.threads, self._caller.loop, partial(self._work, work)
        if parses and where is Where.JSON_THREAD:
            done = threads.parse(loop, work, self._endpoint.engine.settings.limits, self._caller_number)
        else:
            done = threads.run(where, loop, work)
        self._working = True
        done.add_done_callback(partial(self._worked, then))

    def _work(self, work: Callable[[], T]) -> T:
        if self._left is not None:
            raise self._left
        if self._is_overdue:
            raise client_gone()  # nobody sees it
        return work()

    def _worked(self, then: Callable[[Any], object], done: "asyncio.Future[Any]") -> None:
        self._working = False
        if self._is_overdue:
            done.exception()  # else asyncio logs that nobody has asked for it
            self._release()
            return
        try:
            result = done.result()
            if self._left is not None:
                raise self._left
            then(result)
        except Exception as error:
            self.refuse(error)


def _no_pause() -> None:
    """On the event loop."""
