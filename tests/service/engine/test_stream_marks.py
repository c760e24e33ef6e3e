"""The names of streams in a trace, of the form that torch's profiler writes for a GPU."""

import json
from typing import Any

from expertd.service.engine.stream_marks import with_stream_names


def annotation(name: str, stream: int) -> dict[str, Any]:
    where = {"pid": 0, "tid": stream, "ts": 5.5, "dur": 1.0}
    return {"ph": "X", "cat": "gpu_user_annotation", "name": name, **where, "args": {"External id": 3}}


def thread(stream: int) -> dict[str, Any]:
    name = {"name": f"stream {stream} "}
    return {"name": "thread_name", "ph": "M", "ts": 0.0, "pid": 0, "tid": stream, "args": name}


def names(*events: dict[str, Any]) -> dict[int, str]:
    trace = json.loads(with_stream_names(json.dumps({"traceEvents": events}, indent=2).encode()))
    assert len(trace["traceEvents"]) == len(events)
    return {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}


def test_streams_that_were_marked_have_names() -> None:
    events = [
        annotation("expertd stream: decode lane, partition decode (16 SMs)", 7),
        annotation("expertd stream: copies in", 77),
        annotation("expertd stream: copies out", 77),
        annotation("expertd stream: copies in", 77),
        annotation("another range", 8),
    ]
    assert names(thread(7), *events, thread(77), thread(8)) == {
        7: "decode lane, partition decode (16 SMs) (stream 7)",
        77: "copies in, copies out (stream 77)",
        8: "stream 8 ",
    }


def test_a_trace_without_marks_stays_as_it_is() -> None:
    trace = json.dumps({"traceEvents": [thread(7)]}).encode()
    assert with_stream_names(trace) == trace
