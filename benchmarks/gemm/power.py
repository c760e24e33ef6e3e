"""Watts, MHz and pJ/FLOP of a GEMM: as a loop of launches, and as single launches on a cold L2.

A server runs its GPU at the power limit, where the energy of an operation sets the speed. A single launch is
shorter than the sensors' period, so each figure is the mean of a second of launches. In the cold case a fill
flushes L2 before every launch, and the energy of as many fills alone is subtracted.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from benchmarks.lib.nvml import Sample, Sensor, mean_watts
from benchmarks.lib.timing import FLUSH_BYTES

Call = Callable[[], object]
SECONDS = 1.0
WARM_SECONDS = 0.3  # until the clock has settled; not counted
PERIOD_SECONDS = 0.002  # between samples
_BATCH, _IN_FLIGHT = 8, 2  # launches between events, and the events the host may be ahead


@dataclass(frozen=True)
class Figures:
    """us of one repetition, and the mean watts of the board and MHz of the SMs meanwhile."""

    us: float
    watts: float
    mhz: float

    @property
    def microjoules(self) -> float:
        return self.us * self.watts


class Sampling:
    """Reads a sensor in a thread while the context is open."""

    def __init__(self, sensor: Sensor, period_seconds: float = PERIOD_SECONDS) -> None:
        self.samples: list[Sample] = []
        self._sensor, self._period = sensor, period_seconds
        self._end = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Sampling":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        if self._error:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._end.wait(self._period):
                self.samples.append(self._sensor.read())
        except Exception as error:  # raised again where the context ends
            self._error = error


def measure(ours: Call, theirs: Call | None, flops: int, sensor: Sensor) -> dict[str, Any]:
    """{"loop": {"ours": entry, "deep_gemm": entry}, "cold": the same}, see `entry`.

    ours, theirs  the calls, of `flops` operations each; in the loop they take turns, two each
    """
    calls = {"ours": ours} | ({"deep_gemm": theirs} if theirs else {})
    flush = _flush()
    fill = figures(flush, sensor)
    cold = {name: figures(_after(flush, call), sensor) for name, call in calls.items()}
    turns: dict[str, list[Figures]] = {name: [] for name in calls}
    for _ in range(2):
        for name, call in calls.items():
            turns[name].append(figures(call, sensor))
    loop = {name: mean(of_call) for name, of_call in turns.items()}
    return {
        "loop": {name: entry(of_call, flops) for name, of_call in loop.items()},
        "cold": {name: entry(of_call, flops, fill) for name, of_call in cold.items()},
    }


def figures(call: Call, sensor: Sensor, seconds: float = SECONDS) -> Figures:
    """The figures of `call`, repeated for `seconds`."""
    _repeat(call, WARM_SECONDS)
    with Sampling(sensor) as sampling:
        us = _repeat(call, seconds)
    return Figures(us, mean_watts(sampling.samples), fmean(sample.mhz for sample in sampling.samples))


def mean(turns: Sequence[Figures]) -> Figures:
    """The mean of each figure."""
    return Figures(
        fmean(turn.us for turn in turns),
        fmean(turn.watts for turn in turns),
        fmean(turn.mhz for turn in turns),
    )


def entry(of_call: Figures, flops: int, around: Figures | None = None) -> dict[str, float]:
    """us, watts, mhz and pj_per_flop for a row; us and energy are less those of `around`."""
    us = of_call.us - (around.us if around else 0)
    microjoules = of_call.microjoules - (around.microjoules if around else 0)
    return {
        "us": us, "watts": of_call.watts, "mhz": of_call.mhz, "pj_per_flop": microjoules * 1e6 / flops,
    }  # fmt: skip


def _flush() -> Call:
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    return lambda: flush.fill_(1)


def _after(first: Call, then: Call) -> Call:
    def both() -> None:
        first()
        then()

    return both


def _repeat(call: Call, seconds: float) -> float:
    """us of a repetition; the host stays a few launches ahead, so that the GPU never waits for it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    marks: deque[torch.cuda.Event] = deque()
    repetitions, until = 0, time.perf_counter() + seconds
    begin.record()
    while time.perf_counter() < until:
        for _ in range(_BATCH):
            call()
        repetitions += _BATCH
        marks.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
        marks[-1].record()
        if len(marks) > _IN_FLIGHT:
            marks.popleft().synchronize()
    end.record()
    end.synchronize()
    return float(1e3 * begin.elapsed_time(end) / repetitions)
