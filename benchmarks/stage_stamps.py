"""Stamps of what a server does with each short request of a channel, and of what may hold it up meanwhile."""

import functools
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Stamp = tuple[str, int, int]
"""What happened, and when it began and ended, as time.perf_counter_ns says in every process."""

_NOW = time.perf_counter_ns


class Stamps:
    """Takes them from `install` on: some microseconds a request, on the threads that are looked at.

    most_tokens  of a request or step that is looked at
    """

    def __init__(self, most_tokens: int) -> None:
        # As lines: with tuples, the collector would be called more often.
        self._taken: list[str] = []
        self._most_tokens = most_tokens
        self._short: set[int] = set()  # ids of short steps that run
        self._collects_from = 0

    def install(self) -> None:
        """Look at a request's way, submit, begin and wait, and at what may hold it up.

        That is what the worker thread does for the prefill lane, reports, and collections of garbage.
        """
        from expertd.service.channels.channel import Channel
        from expertd.service.engine.delivery import Delivery
        from expertd.service.engine.lane_work import LaneWork
        from expertd.service.moe.request import LayerRequest
        from expertd.service.moe.runner import LayerRunner
        from expertd.service.moe.running import DoneStep, RunningStep

        report_later, begin = Delivery.report_later, LayerRunner.begin
        begin_short = self._timed(begin, "begin")

        def timed_later(delivery: Delivery, report: Callable[[], None]) -> None:
            report_later(delivery, self._timed(report, "report"))

        def is_short(channel: Channel, slot: object, data: bytes) -> bool:
            return int.from_bytes(data[:4], "little") <= self._most_tokens

        def timed_begin(runner: LayerRunner, requests: Sequence[LayerRequest]) -> RunningStep | DoneStep:
            if sum(request.num_tokens for request in requests) > self._most_tokens:
                return begin(runner, requests)
            step: RunningStep | DoneStep = begin_short(runner, requests)
            self._short.add(id(step))
            return step

        def waits_for_short(step: RunningStep | DoneStep) -> bool:
            is_short = id(step) in self._short
            self._short.discard(id(step))
            return is_short

        def is_prefill(work: LaneWork) -> bool:
            return work.lane == 1

        for owner, method, timed in (
            (Channel, "_submit", self._timed(Channel._submit, "submit", is_short)),
            (LayerRunner, "begin", timed_begin),
            (RunningStep, "wait", self._timed(RunningStep.wait, "wait", waits_for_short)),
            (DoneStep, "wait", self._timed(DoneStep.wait, "wait", waits_for_short)),
            (LaneWork, "do_next", self._timed(LaneWork.do_next, "prefill", is_prefill, bool)),
            (LaneWork, "finish_if_done", self._timed(LaneWork.finish_if_done, "prefill", is_prefill, bool)),
            (Delivery, "report_later", timed_later),
        ):
            setattr(owner, method, timed)
        gc.callbacks.append(self._collects)

    def write(self, path: Path) -> None:
        """Write the stamps so far, and forget them."""
        taken, self._taken = self._taken, []
        path.write_text("\n".join(taken))

    def _timed(
        self,
        call: Callable[..., Any],
        name: str,
        counts: Callable[..., bool] = lambda *_: True,
        did: Callable[[Any], bool] = lambda _: True,
    ) -> Callable[..., Any]:
        """`call`, with stamps if `counts` says so of its arguments, and `did` of its result."""

        def timed(*arguments: Any) -> Any:
            if not counts(*arguments):
                return call(*arguments)
            began, result = _NOW(), True
            try:
                result = call(*arguments)
                return result
            finally:
                if did(result):
                    self._taken.append(f"{name} {began} {_NOW()}")

        functools.update_wrapper(timed, call, assigned=("__doc__",), updated=())
        return timed

    def _collects(self, phase: str, what: dict[str, int]) -> None:
        if phase == "start":
            self._collects_from = _NOW()
        else:
            self._taken.append(f"gc{what['generation']} {self._collects_from} {_NOW()}")


def read_stamps(path: Path) -> list[Stamp]:
    """What `Stamps.write` has written."""
    lines = (line.split() for line in path.read_text().splitlines())
    return [(name, int(began), int(ended)) for name, began, ended in lines]
