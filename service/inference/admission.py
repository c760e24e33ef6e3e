"""The admission of an infer request: what is checked before its body, why it is refused, how it is counted.

It knows nothing of the way from the body to the answer, which is in `call`.
"""

import logging
import time
from typing import Any

from expertd.service.engine.errors import EngineError
from expertd.service.engine.metrics.requests import StageSeconds
from expertd.service.engine.spec import LayerSpec
from expertd.service.engine.steps import StepTimes
from expertd.service.inference.endpoint import InferEndpoint
from expertd.service.inference.errors import RequestError
from expertd.service.inference.head import InferHead
from expertd.service.inference.plan import RequestPlan
from expertd.service.inference.tensors import check_tokens
from expertd.service.memory import RegionError
from expertd.service.moe.step.stages import TimedStep
from expertd.service.tracing import Rpc, TraceContext, TracedRequest, Tracing, trace_context
from expertd.service.tracing.context import Headers
from expertd.service.util.logs import with_fields
from expertd.service.util.sentences import shortened, shown

logger = logging.getLogger(__name__)


class RequestAdmission:
    """`check` lets a request in, `refuse` says why it is not answered with an output, and `end` counts it.

    rpc       the gRPC call that it came in; None: over HTTP
    key_name  its caller's; known once it is checked, as `caller`: the number of that, for the queue
    plan      once its body is parsed
    timed     where its steps' times go, if it has spans
    """

    __slots__ = (
        "_context",
        "_endpoint",
        "_head",
        "_refusal",
        "_rpc",
        "_sampled",
        "_stages",
        "_started",
        "_times",
        "caller",
        "key_name",
        "plan",
        "timed",
    )

    def __init__(self, endpoint: InferEndpoint, head: InferHead, rpc: Rpc | None = None) -> None:
        self._started = time.perf_counter()
        self._endpoint = endpoint
        self._head = head  # shared with other requests: what follows is of this one
        self._rpc = rpc
        self.key_name, self.caller = "", 0
        self.plan: RequestPlan | None = None
        self._refusal: RequestError | None = None
        self._stages: StageSeconds | None = None
        self._times: StepTimes | None = None  # for spans and the log
        self._sampled: bool | None = None  # whether it has spans; None: not decided yet
        self._context: TraceContext | None = None
        self.timed: list[TimedStep] | None = None

    def check(self) -> LayerSpec:
        """Check all that is known before the body. Raises RequestError and EngineError."""
        head, engine = self._head, self._endpoint.engine
        self._endpoint.gate.admit_infer(head)
        self.key_name, self.caller = head.key_name, head.caller
        spec = engine.model(head.model, head.version)
        engine.check_loaded(head.model)
        engine.check_capacity(head.model, caller=head.caller)  # first: one that drains refuses all sizes
        head.read(engine.settings.limits)
        if (num_tokens := head.min_tokens(spec)) > 1:
            check_tokens(num_tokens, spec, at_least="at least ")
            engine.check_capacity(head.model, num_tokens, head.caller)
        if head.has_large_text:
            self._endpoint.threads.check_json(engine.settings.limits, head.caller)
        return spec

    # Refusals.

    @property
    def is_refused(self) -> bool:
        return self._refusal is not None

    def refuse(self, error: Exception) -> Any:
        """The answer that says why the request is refused."""
        refusal = self._refusal = _refusal_of(error, self._head.model)
        refusal.request_id = self._request_id
        _forget_frames(refusal)
        return self._head.refusal(refusal, self._status)

    def refuse_at_once(self, error: Exception) -> Any:
        """As `refuse`, for a request that ends by that: its body is not received."""
        answer = self.refuse(error)
        self.end()
        return answer

    # Its times, and its end.

    def is_sampled(self, tracing: Tracing) -> bool:
        """Whether the request has spans; decided once: before its step, if it has one."""
        if self._sampled is None:
            self._context = trace_context(self._metadata)
            self._sampled = tracing.samples(self._context)
        return self._sampled

    def note_times(self, pending: Any) -> None:
        """Keep when the engine had the request, which its `submit` returned as `pending`."""
        if self._endpoint.tracing is not None or self._endpoint.logs_requests:
            self._times = pending.times(time.perf_counter())
        if pending.began is not None:
            waited = pending.began - pending.arrived
            self._stages = pending.arrived - self._started, waited, pending.compute_seconds

    def end(self, delivered: bool = True) -> None:
        """Count the request, log it and have its spans made.

        delivered  whether the answer was sent; if not, its caller has gone
        """
        if not delivered:
            self._refusal = client_gone()
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
        if (tracing := endpoint.tracing) is not None and self.is_sampled(tracing):
            self._trace(tracing, refusal, seconds)

    def _trace(self, tracing: Tracing, refusal: RequestError | None, seconds: float) -> None:
        """Have spans of the request made."""
        tracing.add(
            TracedRequest(
                started=self._started,
                ended=self._started + seconds,
                context=self._context,
                times=self._times,
                rpc=self._rpc,
                headers=self._head.headers,
                is_tls=self._endpoint.engine.settings.tls.is_on,
                model=shortened(self._head.model),
                request_id=self._request_id,
                tokens=None if self.plan is None else self.plan.num_tokens,
                status=self._status,
                reason=None if refusal is None else refusal.reason,
                timed=() if self.timed is None else self.timed,
            )
        )

    def _log(self, refusal: RequestError | None, seconds: float) -> None:
        """The line of the request."""
        status, trace = self._status, trace_context(self._metadata)
        receive, queue, compute = self._stages or self._remote_stages() or (None, None, None)
        fields = with_fields(
            model=shortened(self._head.model),
            status=status,
            reason=None if refusal is None else refusal.reason,
            error=None if refusal is None else refusal.message,
            request_id=self._request_id,
            key=self.key_name or None,
            tokens=None if self.plan is None else self.plan.num_tokens,
            seconds=round(seconds, 6),
            receive_seconds=receive and round(receive, 6),
            queue_seconds=queue and round(queue, 6),
            compute_seconds=compute and round(compute, 6),
            trace_id=None if trace is None else trace.trace_id,
            parent_span_id=None if trace is None else trace.span_id,
        )
        logger.info("infer %d", status, extra=fields)

    def _remote_stages(self) -> StageSeconds | None:
        """As `_stages`, of a request that was computed in the engine's process."""
        times = self._times
        if self._refusal is not None or times is None or times.began is None:
            return None
        return times.arrived - self._started, times.began - times.arrived, times.ended - times.began

    @property
    def _status(self) -> int:
        """What logs and spans call how it ended."""
        return self._endpoint.status_of(None if self._refusal is None else self._refusal.reason)

    @property
    def _metadata(self) -> Headers:
        """Where the caller's trace context is."""
        return self._head.headers if self._rpc is None else self._rpc.headers

    @property
    def _request_id(self) -> str | None:
        """The caller's own id of the request, as far as it is known."""
        if self._refusal is not None and self._refusal.request_id is not None:
            return self._refusal.request_id
        return self._head.request_id if self.plan is None else self.plan.request.id


def client_gone() -> RequestError:
    """The outcome of a request that nobody waits for any more."""
    return RequestError("the client closed the connection", reason="client_gone")


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


def _forget_frames(error: BaseException | None) -> None:
    """They refer to the request, whose memory would else wait for the garbage collector."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
