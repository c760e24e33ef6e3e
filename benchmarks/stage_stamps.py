"""Stamps of what a server does with each request of a channel, and of what may hold it up meanwhile."""

import functools
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Stamp = tuple[str, int, int]
"""What happened, and when it began and ended, as time.perf_counter_ns says in every process."""

_NOW = time.perf_counter_ns


class Stamps:
    """Takes them from `install` on: some microseconds a request, on the threads that are looked at."""

    def __init__(self) -> None:
        self._taken: list[Stamp] = []
        self._collects_from = 0

    def install(self) -> None:
        """Look at a request's way, submit, begin and wait, and at reports and collections of garbage."""
        from expertd.service.channels.channel import Channel
        from expertd.service.engine.delivery import Delivery
        from expertd.service.moe.runner import LayerRunner
        from expertd.service.moe.running import DoneStep, RunningStep

        for owner, method, name in (
            (Channel, "_submit", "submit"),
            (LayerRunner, "begin", "begin"),
            (RunningStep, "wait", "wait"),
            (DoneStep, "wait", "wait"),
        ):
            setattr(owner, method, self._timed(getattr(owner, method), name))
        report_later = Delivery.report_later

        def timed_later(delivery: Delivery, report: Callable[[], None]) -> None:
            report_later(delivery, self._timed(report, "report"))

        Delivery.report_later = timed_later  # type: ignore[method-assign]
        gc.callbacks.append(self._collects)

    def write(self, path: Path) -> None:
        """Write the stamps so far, and forget them."""
        taken, self._taken = self._taken, []
        path.write_text(json.dumps(taken))

    def _timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = _NOW()
            try:
                return call(*arguments)
            finally:
                self._taken.append((name, began, _NOW()))

        functools.update_wrapper(timed, call, assigned=("__doc__",), updated=())
        return timed

    def _collects(self, phase: str, what: dict[str, int]) -> None:
        if phase == "start":
            self._collects_from = _NOW()
        else:
            self._taken.append((f"gc {what['generation']}", self._collects_from, _NOW()))
