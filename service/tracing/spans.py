"""Makes spans with OpenTelemetry's SDK, which exports them in batches; needs expertd[otel]."""

import time
from collections.abc import Iterable, Iterator

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    server_attributes,
    service_attributes,
    url_attributes,
)
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from expertd import __version__
from expertd.service.tracing.context import Headers, TraceContext
from expertd.service.tracing.exporter import Exporter
from expertd.service.tracing.request import TracedRequest

_Attributes = dict[str, str | int]

_BATCH = 64  # spans: a batch is serialized in a few milliseconds, in which other threads take turns with it
_STEP = "step"
_ROUTE = "/v2/models/{model}/infer"
_CLIENT_GONE = 499  # no answer was sent


class Spans:
    """Sends spans to `endpoint`, a URL; those of the SDK's own variables in the environment count, too."""

    def __init__(self, endpoint: str) -> None:
        about = {service_attributes.SERVICE_NAME: "expertd", service_attributes.SERVICE_VERSION: __version__}
        resource = Resource.create(about).merge(
            OTELResourceDetector().detect()
        )  # the environment's name wins
        # What is sampled was decided before.
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        processor = BatchSpanProcessor(Exporter(endpoint), max_export_batch_size=_BATCH)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("expertd", __version__)

    def add(self, request: TracedRequest) -> None:
        """Make the spans of a request: the server's, one for each part of its time, and its stages'."""
        epoch = time.time_ns() - time.perf_counter_ns()

        def at(seconds: float) -> int:
            within = max(request.started, min(seconds, request.ended))
            return epoch + int(within * 1e9)

        rpc = request.rpc
        name = f"POST {_ROUTE}" if rpc is None else rpc.method
        span = self._tracer.start_span(
            name,
            context=Context() if request.context is None else _remote(request.context),
            kind=SpanKind.SERVER,
            attributes=dict(_attributes(request)),
            start_time=at(request.started),
        )
        if request.status >= 500 or request.status == _CLIENT_GONE:
            span.set_status(StatusCode.ERROR, request.reason)
        inside = set_span_in_context(span, Context())
        stages = [(stage, timed.clock) for timed in request.timed for stage in timed.stages()]
        last = max((stage.ended for stage, _ in stages), default=0.0)
        for part, begin, end, attributes in _parts(request, last):
            child = self._tracer.start_span(part, inside, attributes=attributes, start_time=at(begin))
            if part == _STEP:
                of_step = [(stage.name, at(stage.began), at(stage.ended), clock) for stage, clock in stages]
                self._add_stages(child, of_step, at(begin), at(end))
            child.end(at(end))
        span.end(at(request.ended))

    def _add_stages(
        self, step: Span, stages: Iterable[tuple[str, int, int, str]], begin: int, end: int
    ) -> None:
        """Make the spans within `step`, which lasts from `begin` to `end`.

        stages  name, begin, end and clock; what a GPU's says is known to within some microseconds
        """
        inside = set_span_in_context(step, Context())
        for name, began, ended, clock in stages:
            began, ended = max(began, begin), min(ended, end)
            if began < ended:
                attributes = {"expertd.clock": clock}
                span = self._tracer.start_span(name, inside, attributes=attributes, start_time=began)
                span.end(ended)

    def close(self) -> None:
        """Export what is left; may take as long as the exporter's timeout."""
        self._provider.shutdown()


def _remote(context: TraceContext) -> Context:
    """The caller's span."""
    span = SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=TraceState.from_header(list(context.state)),
    )
    return set_span_in_context(NonRecordingSpan(span), Context())


def _parts(request: TracedRequest, last: float) -> Iterator[tuple[str, float, float, _Attributes]]:
    """Name, begin, end and attributes of what a request went through, without gaps.

    last  when its last stage ended
    """
    times = request.times
    if times is None:
        return
    yield "receive", request.started, times.arrived, {}
    ended = times.ended
    yield "queue", times.arrived, ended if times.began is None else times.began, {}
    if times.began is not None:
        tokens: _Attributes = {"expertd.step.tokens": times.tokens} if times.tokens else {}
        # A step that began beside another ends later than the time that it took after its begin.
        ended = max(ended, last)
        yield _STEP, times.began, ended, tokens
    yield "answer", ended, request.ended, {}


def _attributes(request: TracedRequest) -> Iterator[tuple[str, str | int]]:
    yield "expertd.model", request.model
    if request.tokens is not None:
        yield "expertd.tokens", request.tokens
    if request.request_id is not None:
        yield "expertd.request_id", request.request_id
    if request.reason is not None:
        yield "expertd.refusal", request.reason
        if request.status >= 500 or request.status == _CLIENT_GONE:
            yield error_attributes.ERROR_TYPE, request.reason
    if request.rpc is not None:
        # Not in the SDK's stable conventions yet, and their module for others may change.
        yield "rpc.system.name", "grpc"
        yield "rpc.method", request.rpc.method
        yield "rpc.response.status_code", request.rpc.code(request.status, request.reason)
        return
    yield http_attributes.HTTP_REQUEST_METHOD, "POST"
    yield http_attributes.HTTP_ROUTE, _ROUTE
    yield url_attributes.URL_PATH, _ROUTE.replace("{model}", request.model)
    yield url_attributes.URL_SCHEME, "https" if request.is_tls else "http"
    if request.status != _CLIENT_GONE:
        yield http_attributes.HTTP_RESPONSE_STATUS_CODE, request.status
    yield from _server(request.headers)


def _server(headers: Headers) -> Iterator[tuple[str, str | int]]:
    """The server as the caller named it."""
    host = next((value for name, value in headers if name == b"host"), b"").decode("latin-1")
    name, _, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
    if not name:
        name, port = host, ""
    if name:
        yield server_attributes.SERVER_ADDRESS, name.strip("[]")
    if port.isdecimal():
        yield server_attributes.SERVER_PORT, int(port)
