"""Joins the Chrome traces of several processes, which may run on several nodes, into one."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_FLOWS = 1 << 40  # numbers of flows, such as that from a launch to its kernel, within one process


def of_process(trace: bytes, name: str, index: int, base: int) -> bytes:
    """The events of a process for a joint trace, as a list in JSON: named, and with numbers of its own.

    index  of the process among all
    base   the joint trace's baseTimeNanoseconds, from which its times count
    """
    return _listed(_events(json.loads(trace), name, index, base))


def joint(own: bytes, name: str, others: Callable[[int], Sequence[bytes]]) -> bytes:
    """The trace of a process, called `name`, with the events of others.

    others  returns them as `of_process` does, given its `base`
    """
    head = json.loads(own)
    base = head["baseTimeNanoseconds"]
    texts = [_listed(_events(head, name, 0, base)), *others(base)]
    del head["traceEvents"]
    events = b",\n".join(text[1:-1] for text in texts if text != b"[]")
    return json.dumps(head).encode()[:-1] + b', "traceEvents": [\n' + events + b"\n]}"


def _events(trace: Mapping[str, Any], name: str, index: int, base: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = trace["traceEvents"]
    later = (trace["baseTimeNanoseconds"] - base) / 1000
    labels = {event["pid"]: event["args"]["labels"] for event in events if event["name"] == "process_labels"}
    used = {event["pid"] for event in events if event["ph"] != "M"}
    kept = {pid for pid, label in labels.items() if pid in used or label == "CPU"}  # else a GPU of others
    numbers = {pid: 1000 * (index + 1) + number for number, pid in enumerate(sorted(kept))}
    found = []
    for event in events:
        if (pid := event["pid"]) not in kept:
            continue
        event = {**event, "pid": numbers[pid], "ts": event["ts"] + later}
        if "id" in event:
            event["id"] += _FLOWS * index
        if event["name"] == "process_name":
            event["args"] = {"name": f"{name}: {labels.get(pid, pid)}"}
        elif event["name"] == "process_sort_index":
            event["args"] = {"sort_index": numbers[pid]}
        found.append(event)
    return found


def _listed(events: Sequence[Mapping[str, Any]]) -> bytes:
    return json.dumps(events).encode()
