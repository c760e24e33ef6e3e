"""traceparent, by the rules of W3C Trace Context."""

import pytest

from expertd.service.http.trace_context import TraceContext, trace_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def of(*values: str) -> TraceContext | None:
    return trace_context([(b"host", b"a"), *((b"traceparent", value.encode()) for value in values)])


@pytest.mark.parametrize(
    "value", [f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00", f"cc-{TRACE}-{SPAN}-01-later"]
)
def test_valid_ones_are_taken(value: str) -> None:
    assert of(value) == TraceContext(TRACE, SPAN)


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
