"""How an infer request ends: answered, refused, left by its client, or forwarded; and its count."""

import asyncio
import logging
import time
from typing import Any, Protocol

from expertd.service.engine.errors import RegionsElsewhereError
from expertd.service.engine.request_counts import Stages
from expertd.service.engine.steps import StepTimes
from expertd.service.http.answers import client_gone, refusal_of
from expertd.service.http.deadline import Deadline
from expertd.service.http.endpoint import InferEndpoint
from expertd.service.http.infer_body import Received
from expertd.service.http.infer_head import InferHead
from expertd.service.http.protocol import OipError
from expertd.service.http.refused import Headers
from expertd.service.inference.plan import Plan
from expertd.service.log_lines import with_fields
from expertd.service.memory import Arena, Block, RegionUses, host_view
from expertd.service.moe.stages import TimedStep
from expertd.service.sentences import shortened, shown
from expertd.service.tracing import Rpc, TraceContext, TracedRequest, Tracing, trace_context

logger = logging.getLogger(__name__)

_NOTHING = Received(b"", None)


class Caller(Protocol):
    """Who asked."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    def reply(self, call: "InferEnding", answer: Any) -> None:
        """Send `answer`, then call `call.sent`; None: the request has ended, and nobody waits for it."""


class InferEnding:
    """The state of a request, and its ends: `refuse` and `leave` at any time, `sent` after `caller.reply`.

    rpc  the gRPC call that it came in; None: over HTTP
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
        "_left",
        "_output",
        "_pending",
        "_plan",
        "_received",
        "_refusal",
        "_regions",
        "_rpc",
        "_sampled",
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
        self._plan: Plan | None = None
        self._pending: Any = None  # what the engine's `submit` returned, until its answer
        self._rpc = rpc
        self._stages: Stages | None = None
        self._times: StepTimes | None = None  # for spans and the log
        self._sampled: bool | None = None  # for spans, as the next two; None: not decided yet
        self._trace_context: TraceContext | None = None
        self._timed: list[TimedStep] | None = None
        self._forwarding: asyncio.Future[Any] | None = None
        self._deadline: Deadline | None = None  # of a request with a timeout, once that is known
        self._left: OipError | None = None
        self._refusal: OipError | None = None
        self._working = False  # in a thread
        self._is_responding = False  # there: its output is stored or encoded
        self._is_overdue = False  # answered, while a step or a thread still uses its memory

    def refuse(self, error: Exception) -> None:
        """Answer with `error`."""
        if self._deadline is not None:
            self._deadline.cancel()
        if isinstance(error, RegionsElsewhereError) and self._left is None:
            self._forward()
            return
        refusal = self._refusal = self._left or self._refusal_of(error)
        self._release()
        if self._left is None:
            self._caller.reply(self, self._head.refusal(refusal))
        else:
            self._count()
            self._caller.reply(self, None)

    def refuse_before_its_end(self, error: Exception) -> None:
        """Answer with `error` while a step or a thread uses the request: its memory is given back later."""
        self._is_overdue = True
        refusal = self._refusal = self._refusal_of(error)
        self._caller.reply(self, self._head.refusal(refusal))

    def leave(self, error: OipError | None = None) -> None:
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

    def _refusal_of(self, error: Exception) -> OipError:
        refusal = refusal_of(error, self._head.model)
        refusal.request_id = self._id_of(refusal)
        _forget_frames(refusal)
        return refusal

    def _forward(self) -> None:
        """Have the engine's process answer."""
        forward = self._endpoint.forward
        assert forward is not None
        content = bytes(host_view(self._received.content))
        self._received.release()
        self._forwarding = task = asyncio.ensure_future(forward(self._head, self._key_name, content))
        task.add_done_callback(self._forwarded)

    def _forwarded(self, task: "asyncio.Future[Any]") -> None:
        if self._left is not None or task.cancelled():
            self._caller.reply(self, None)
        elif (error := task.exception()) is not None:
            self._forwarding = None  # the engine has not counted it
            self.refuse(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        else:
            self._caller.reply(self, task.result())

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
        head, metrics, refusal = self._head, self._endpoint.metrics, self._refusal
        known = head.model if head.model in self._endpoint.engine.models else ""
        status = 200
        if refusal is not None:
            status, self._stages = refusal.status, None
            metrics.refused(known, refusal.reason)
            what = (status, refusal.reason, shown(head.model), shown(refusal.request_id), refusal.message)
            logger.debug("%d %s: model %s, id %s: %s", *what)
        seconds = time.perf_counter() - self._started
        metrics.request_done(known, status, seconds, self._stages)
        if self._endpoint.logs_requests:
            self._log(status, refusal, seconds)
        if (tracing := self._endpoint.tracing) is not None:
            self._trace(tracing, status, refusal, seconds)

    @property
    def _metadata(self) -> Headers:
        """Where the caller's trace context is."""
        return self._head.headers if self._rpc is None else self._rpc.headers

    def _id_of(self, refusal: OipError | None) -> str | None:
        """The caller's own id of the request, as far as it is known."""
        if refusal is not None and refusal.request_id is not None:
            return refusal.request_id
        return self._head.request_id if self._plan is None else self._plan.request.id

    def _note_times(self) -> None:
        """Keep when the engine had the request."""
        if self._pending is not None:
            self._times = self._pending.times(time.perf_counter())

    def _remote_stages(self, status: int) -> Stages | None:
        """As `_stages`, of a request that was computed in the engine's process."""
        times = self._times
        if status != 200 or times is None or times.began is None:
            return None
        return times.arrived - self._started, times.began - times.arrived, times.ended - times.began

    def _is_sampled(self, tracing: Tracing) -> bool:
        """Whether the request has spans; decided once: before its step, if it has one."""
        if self._sampled is None:
            self._trace_context = trace_context(self._metadata)
            self._sampled = tracing.samples(self._trace_context)
        return self._sampled

    def _trace(self, tracing: Tracing, status: int, refusal: OipError | None, seconds: float) -> None:
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
                status=status,
                reason=None if refusal is None else refusal.reason,
                timed=() if self._timed is None else self._timed,
            )
        )

    def _log(self, status: int, refusal: OipError | None, seconds: float) -> None:
        """The line of the request."""
        head, plan, trace = self._head, self._plan, trace_context(self._metadata)
        receive, queue, compute = self._stages or self._remote_stages(status) or (None, None, None)
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


def _forget_frames(error: BaseException | None) -> None:
    """They refer to the request, whose memory would else wait for the garbage collector."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
