"""traceparent, by the rules of W3C Trace Context."""

import pytest

from expertd.service.tracing import TraceContext, trace_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def of(*values: str) -> TraceContext | None:
    return trace_context([(b"host", b"a"), *((b"traceparent", value.encode()) for value in values)])


@pytest.mark.parametrize(
    ("value", "is_sampled"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-02", False),
        (f"cc-{TRACE}-{SPAN}-03-later", True),
    ],
)
def test_valid_ones_are_taken(value: str, is_sampled: bool) -> None:
    assert of(value) == TraceContext(TRACE, SPAN, is_sampled)


def test_the_state_of_all_headers_is_kept() -> None:
    headers = [
        (b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()),
        (b"tracestate", b"a=1"),
        (b"tracestate", b"b=2"),
    ]
    assert trace_context(headers) == TraceContext(TRACE, SPAN, True, ("a=1", "b=2"))


@pytest.mark.parametrize(
    "value",
    [
        "",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-later",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_others_are_ignored(value: str) -> None:
    assert of(value) is None


def test_several_are_ignored() -> None:
    assert of() is None
    assert of(f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01") is None
