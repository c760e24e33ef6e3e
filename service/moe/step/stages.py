"""The stages of a step that has a traced request, timed by the device that computes it.

Imports no torch.
"""

import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from expertd.service.device import Device, Event, Stream

logger = logging.getLogger(__name__)

# Launching a small step kernel by kernel takes the host 0.3 ms longer than its graph. With many requests in
# each step, one in a hundred that is sampled would have every other step pay that.
_PAUSE_SECONDS = 0.1
_KEPT = 64  # events for further steps: those of a few
# The host's time of an event is known to within half of what recording it and waiting for it takes.
_CLOCK_SECONDS = 30e-6
_CLOCK_TRIES = 5


class Stage(NamedTuple):
    """A part of a step, and when it began and ended, by time.perf_counter."""

    name: str
    began: float
    ended: float


class TimedStep(Protocol):
    """A step whose stages are timed.

    clock  whose times they are, "gpu" or "host"
    """

    clock: ClassVar[str]

    def stages(self) -> Sequence[Stage]:
        """In their order; none before the step's end, or if the device failed. For one thread at a time."""


class HostStages:
    """Those of a step on a CPU, from now on; see `expertd.kernels.Stages`."""

    clock: ClassVar[str] = "host"

    def __init__(self) -> None:
        self._stages: list[Stage] = []
        self._marked = time.perf_counter()

    def mark(self, stage: str) -> None:
        """`stage` ends here."""
        now = time.perf_counter()
        self._stages.append(Stage(stage, self._marked, now))
        self._marked = now

    def stages(self) -> Sequence[Stage]:
        """See `TimedStep`."""
        return self._stages


class GpuStages:
    """Those of a step on a GPU; see `expertd.kernels.Stages`. Nothing waits for the GPU."""

    clock: ClassVar[str] = "gpu"

    def __init__(self, events: "Events") -> None:
        self._events = events
        self._marks: list[tuple[str | None, Event]] = []
        self._stages: Sequence[Stage] = ()

    def begin(self, stream: "Stream") -> None:
        """The next stage begins here, on `stream`, as do those that follow."""
        self._stream = stream
        self._record(None)

    def mark(self, stage: str) -> None:
        """`stage` ends here, and the next one begins."""
        self._record(stage)

    def stages(self) -> Sequence[Stage]:
        """See `TimedStep`."""
        if self._marks:
            try:
                if all(event.query() for _, event in self._marks):
                    self._stages = self._read()
            except RuntimeError:  # above all of a device that has failed
                logger.warning("reading the times of a step's stages failed", exc_info=True)
                self._marks = []
        return self._stages

    def _record(self, stage: str | None) -> None:
        event = self._events.take()
        event.record(self._stream)
        self._marks.append((stage, event))

    def _read(self) -> list[Stage]:
        times = self._events.seconds([event for _, event in self._marks])
        stages: list[Stage] = []
        began = times[0]
        for (stage, event), now in zip(self._marks, times, strict=True):
            if stage is not None:
                stages.append(Stage(stage, began, now))
            began = now
            self._events.give_back(event)
        self._marks = []
        return stages


class Events:
    """Events of a GPU, used again and again, and what they say in the host's time.

    `take` is for the threads of steps, `seconds` for one other thread.
    """

    def __init__(self, device: "Device") -> None:
        self._device = device
        self._free: deque[Event] = deque(maxlen=_KEPT)
        self._stream: Stream | None = None

    def take(self) -> "Event":
        """An event that nobody uses."""
        try:
            return self._free.pop()
        except IndexError:
            return self._device.new_event(timing=True)

    def give_back(self, event: "Event") -> None:
        """Nobody uses `event` any more."""
        self._free.append(event)

    def seconds(self, events: Sequence["Event"]) -> list[float]:
        """When events were recorded that the GPU has passed, by time.perf_counter.

        Records one more on an idle stream, and waits for it. The two clocks drift apart, so it is a new one
        each time; and after the others, so that the time from each to it is positive.
        """
        if self._stream is None:
            self._stream, self._base = self._device.new_stream(), self._device.new_event(timing=True)
        for _ in range(_CLOCK_TRIES):
            before = time.perf_counter()
            self._base.record(self._stream)
            self._base.synchronize()
            after = time.perf_counter()
            if after - before < _CLOCK_SECONDS:
                break
        return [(before + after) / 2 - event.elapsed_time(self._base) / 1e3 for event in events]


class StageTimer:
    """Makes what times the steps of a process on its device.

    pause_seconds  between two steps that are timed, at least: on a GPU such a step takes longer, and so does
                   making its spans
    """

    def __init__(self, device: "Device", pause_seconds: float = _PAUSE_SECONDS) -> None:
        self._events = None if device.is_host else Events(device)
        self._pause_seconds = pause_seconds
        self._next = 0.0

    def new(self) -> HostStages | GpuStages | None:
        """For a step that begins now; None: it is too soon after another."""
        now = time.perf_counter()
        if now < self._next:
            return None
        self._next = now + self._pause_seconds
        return HostStages() if self._events is None else GpuStages(self._events)
