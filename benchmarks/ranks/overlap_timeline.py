"""When each launch of an overlapped layer ran, by torch's profiler: as events, and as a trace of them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.layer.moe_layer import FLUSH_BYTES
from benchmarks.ranks.rank_timing import SLEEP_CYCLES, Ranks, begin_together

Event = dict[str, Any]
"""rank, lane, name, start_us and end_us of a launch; times count from the end of a barrier of all ranks."""

LANES = ("all SMs", "gemms", "communication")
NAMES = ("permutation", "dispatch", "gate/up GEMM", "down GEMM", "combine")
_NAME_OF = {
    "permutation_of_ranks": "permutation",
    "few_pairs_of_ranks": "permutation",
    "dispatch_rows": "dispatch",
    "grouped_gemm": "down GEMM",  # but the first of a call
    "combine_rows": "combine",
}
_CALLS = 3  # the last is taken: the profiler and the allocator have got ready in those before
_SLEEP_CYCLES = 8 * SLEEP_CYCLES  # about 4 ms: the host enqueues launches, not a graph, and under a profiler


def profiled_kernels(call: Callable[[], object], ranks: Ranks) -> list[dict[str, Any]]:
    """The events of Chrome's trace of some calls, each made by all ranks together; collective."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_CALLS):
            begin_together(flush, ranks, _SLEEP_CYCLES)
            call()
            torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def step_of(trace: Iterable[Mapping[str, Any]], rank: int) -> list[Event]:
    """The launches of the last call in Chrome's trace, by start. Raises RuntimeError if there is none."""
    kernels = [event for event in trace if event.get("ph") == "X" and event.get("cat") == "kernel"]
    kernels.sort(key=lambda kernel: float(kernel["ts"]))
    begins = [place for place, kernel in enumerate(kernels) if _name(kernel) == "permutation"]
    if not begins:
        raise RuntimeError(f"timeline of rank {rank}: expected a kernel permutation_of_ranks, got none")
    barrier = kernels[max(0, begins[-1] - 1)]
    zero = float(barrier["ts"]) + float(barrier["dur"])
    step = [kernel for kernel in kernels[begins[-1] :] if _name(kernel)]
    lanes = _lanes(step)
    names = [_name(kernel) for kernel in step]
    if "down GEMM" in names:
        names[names.index("down GEMM")] = "gate/up GEMM"
    events = []
    for kernel, name in zip(step, names, strict=True):
        start = float(kernel["ts"]) - zero
        times = {"start_us": round(start, 3), "end_us": round(start + float(kernel["dur"]), 3)}
        events.append({"rank": rank, "lane": lanes[_stream(kernel)], "name": name} | times)
    return events


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """A trace for https://ui.perfetto.dev: a process for each rank, and in it a thread for each lane."""
    threads = {(event["rank"], LANES.index(event["lane"])) for event in events}
    entries: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in threads}):
        common = {"ph": "M", "pid": rank, "tid": 0}
        entries.append(common | {"name": "process_name", "args": {"name": f"rank {rank}"}})
        entries.append(common | {"name": "process_sort_index", "args": {"sort_index": rank}})
    for rank, lane in sorted(threads):
        common = {"ph": "M", "pid": rank, "tid": lane}
        entries.append(common | {"name": "thread_name", "args": {"name": LANES[lane]}})
        entries.append(common | {"name": "thread_sort_index", "args": {"sort_index": lane}})
    for event in events:
        place = {"ph": "X", "pid": event["rank"], "tid": LANES.index(event["lane"])}
        times = {"ts": event["start_us"], "dur": max(0.0, round(event["end_us"] - event["start_us"], 3))}
        entries.append(place | {"name": event["name"], "cat": "kernel"} | times)
    return {"traceEvents": entries, "displayTimeUnit": "ms"}


def _name(kernel: Mapping[str, Any]) -> str:
    """A launch's name; empty for kernels that are not the layer's."""
    return next((name for stem, name in _NAME_OF.items() if stem in kernel["name"]), "")


def _stream(kernel: Mapping[str, Any]) -> tuple[Any, Any]:
    return kernel["args"].get("context"), kernel["args"]["stream"]


def _lanes(step: Sequence[Mapping[str, Any]]) -> dict[tuple[Any, Any], str]:
    """The lane of each stream, by what runs there."""
    names: dict[tuple[Any, Any], set[str]] = {}
    for kernel in step:
        names.setdefault(_stream(kernel), set()).add(_name(kernel))
    return {stream: _lane(of_stream) for stream, of_stream in names.items()}


def _lane(names: set[str]) -> str:
    if names & {"permutation", "dispatch"}:
        return "all SMs"
    return "gemms" if "down GEMM" in names else "communication"
