"""The caller's W3C trace context: https://www.w3.org/TR/trace-context/."""

import re
from collections.abc import Sequence
from typing import NamedTuple

Headers = Sequence[tuple[bytes, bytes]]

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class TraceContext(NamedTuple):
    """The trace that a request belongs to, in hexadecimal, and the caller's span in it.

    is_sampled  whether the caller records its span
    state       the values of `tracestate`, not checked
    """

    trace_id: str
    span_id: str
    is_sampled: bool = False
    state: tuple[str, ...] = ()


def trace_context(headers: Headers) -> TraceContext | None:
    """What `traceparent` says; None without one valid header, as the standard asks for."""
    given = [value for name, value in headers if name == b"traceparent"]
    found = _TRACEPARENT.fullmatch(given[0]) if len(given) == 1 else None
    if found is None or (given[0].startswith(b"00") and found[4]):
        return None
    trace_id, span_id = found[1].decode(), found[2].decode()
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = tuple(value.decode("latin-1") for name, value in headers if name == b"tracestate")
    return TraceContext(trace_id, span_id, bool(int(found[3], 16) & _SAMPLED), state)
