"""Callers of a server at the same time: all of them are ready before what counts begins."""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.lib.processes import Program

POWER_SECONDS = 2.0  # that a GPU takes to reach the clock that its power limit allows
CALLER = "benchmarks.lib.caller"


def begin(callers: Sequence[Program], given: Sequence[dict[str, Any]], seconds: float, lead: float) -> float:
    """Have callers call as they are given, once all are ready; when that begins, by time.perf_counter.

    lead  seconds for which they keep the server busy before
    """
    for caller, each in zip(callers, given, strict=True):
        caller.write(each)
    for caller in callers:
        caller.read()
    start = time.perf_counter() + lead
    for caller in callers:
        caller.write({"start": start, "seconds": seconds})
    return start


def together(
    given: dict[str, Any], seconds: float, processes: int = 1, lead: float = 0.0, module: str = CALLER
) -> list[float]:
    """What requests took in these seconds that processes with the same callers have sent, sorted."""
    with ExitStack() as stack:
        callers = [stack.enter_context(Program(module)) for _ in range(processes)]
        start = begin(callers, [given] * processes, seconds, lead)
        stamps = [stamp for caller in callers for stamp in caller.read()["stamps"]]
    return sorted((answered - sent) / 1e9 for sent, answered in stamps if sent >= 1e9 * start)
