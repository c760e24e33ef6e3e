"""The caller's W3C trace context: https://www.w3.org/TR/trace-context/#traceparent-header."""

import re
from typing import NamedTuple

from expertd.service.http.refused import Headers

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


class TraceContext(NamedTuple):
    """The trace that a request belongs to, in hexadecimal, and the caller's span in it."""

    trace_id: str
    span_id: str


def trace_context(headers: Headers) -> TraceContext | None:
    """What `traceparent` says; None without one valid header, as the standard asks for."""
    given = [value for name, value in headers if name == b"traceparent"]
    found = _TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
    if found is None or (given[0].startswith(b"00") and found[4]):
        return None
    trace_id, span_id = found[1].decode(), found[2].decode()
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id)
