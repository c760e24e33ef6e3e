"""Spans of infer requests, for an OpenTelemetry collector (docs/operating.md)."""

from expertd.service.tracing.context import Headers, TraceContext, trace_context
from expertd.service.tracing.request import Rpc, TracedRequest
from expertd.service.tracing.tracing import Tracing, is_installed, tracing_of

__all__ = [
    "Headers",
    "Rpc",
    "TraceContext",
    "TracedRequest",
    "Tracing",
    "is_installed",
    "trace_context",
    "tracing_of",
]
