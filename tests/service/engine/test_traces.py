"""Traces, of the form that torch's profiler writes for a GPU: names of streams, several processes as one."""

import json
from typing import Any

from expertd.service.engine.joint_trace import joint, of_process
from expertd.service.engine.stream_marks import with_stream_names

BASE = 1_790_000_000_000_000_000


def trace(pid: int, gpu: int, base: int = BASE) -> bytes:
    """A launch, a kernel on GPU `gpu` of two, and the flow between them."""

    def about(pid: int | str, label: str) -> list[dict[str, Any]]:
        names: dict[str, dict[str, Any]] = {
            "process_name": {"name": "python"},
            "process_labels": {"labels": label},
        }
        names["process_sort_index"] = {"sort_index": 7}
        return [
            {"ph": "M", "name": name, "pid": pid, "tid": 0, "ts": 1.0, "args": args}
            for name, args in names.items()
        ]

    span = {"ph": "X", "ts": 5.0, "dur": 1.0, "tid": 3}
    flow = {"cat": "ac2g", "name": "ac2g", "id": 12, "ts": 5.0}
    events = [
        *about(pid, "CPU"), *about(0, "GPU 0"), *about(1, "GPU 1"),
        {**span, "cat": "cpu_op", "name": "launch", "pid": pid},
        {**span, "cat": "kernel", "name": "kernel", "pid": gpu},
        {**flow, "ph": "s", "pid": pid, "tid": 3}, {**flow, "ph": "f", "pid": gpu, "tid": 3},
        {**span, "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler"},
    ]  # fmt: skip
    head = {"schemaVersion": 1, "expertd": {"steps": 2}, "baseTimeNanoseconds": base}
    return json.dumps({**head, "traceEvents": events}).encode()


def joined() -> dict[str, Any]:
    """A front end without a GPU, and two ranks; all have the same process number, as on several nodes."""

    def ranks(base: int) -> list[bytes]:
        of_ranks = trace(50, 0), trace(50, 1, BASE + 2_000_000)  # the second's times count from later on
        return [of_process(each, f"rank {rank}", rank + 1, base) for rank, each in enumerate(of_ranks)]

    own = json.loads(trace(50, 0))
    own["traceEvents"] = [event for event in own["traceEvents"] if event["ph"] == "M"]
    found: dict[str, Any] = json.loads(joint(json.dumps(own).encode(), "front end", ranks))
    return found


def named(trace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["name"] == name]


def test_processes_flows_and_times_are_those_of_one_trace() -> None:
    found = joined()
    names = {event["pid"]: event["args"]["name"] for event in named(found, "process_name")}
    assert sorted(names.values()) == [
        "front end: CPU", "rank 0: CPU", "rank 0: GPU 0", "rank 1: CPU", "rank 1: GPU 1"
    ]  # fmt: skip
    assert [names[event["pid"]] for event in named(found, "kernel")] == ["rank 0: GPU 0", "rank 1: GPU 1"]
    assert [names[event["pid"]] for event in named(found, "launch")] == ["rank 0: CPU", "rank 1: CPU"]
    assert found["expertd"] == {"steps": 2}
    flows = [(event["ph"], event["id"]) for event in named(found, "ac2g")]
    assert len(set(flows)) == 4
    assert len({number for _, number in flows}) == 2
    assert [event["ts"] for event in named(found, "launch")] == [5.0, 2005.0]
    orders = [event["args"]["sort_index"] for event in named(found, "process_sort_index")]
    assert len(set(orders)) == 5


def annotation(name: str, stream: int) -> dict[str, Any]:
    where = {"pid": 0, "tid": stream, "ts": 5.5, "dur": 1.0}
    return {"ph": "X", "cat": "gpu_user_annotation", "name": name, **where, "args": {"External id": 3}}


def thread(stream: int) -> dict[str, Any]:
    name = {"name": f"stream {stream} "}
    return {"name": "thread_name", "ph": "M", "ts": 0.0, "pid": 0, "tid": stream, "args": name}


def stream_names(*events: dict[str, Any]) -> dict[int, str]:
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
    assert stream_names(thread(7), *events, thread(77), thread(8)) == {
        7: "decode lane, partition decode (16 SMs) (stream 7)",
        77: "copies in, copies out (stream 77)",
        8: "stream 8 ",
    }


def test_a_trace_without_marks_stays_as_it_is() -> None:
    trace = json.dumps({"traceEvents": [thread(7)]}).encode()
    assert with_stream_names(trace) == trace
