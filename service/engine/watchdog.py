"""Notices that the device hangs: a step, or a job between two steps, that never ends."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial

from expertd.service.engine.lane import StepLane
from expertd.service.engine.step_time import StepTime

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
_MIN_SECONDS = 10.0  # for any step: others may use the device, or the cores
_TIMES = 20  # as long as a step of its size took before
_ANSWER_SECONDS = 5.0  # for the event loop, which may be the one that waits for the step


def limit_of(max_seconds: float, likely_seconds: float) -> float:
    """The seconds that a step may take which likely takes `likely_seconds`; 0: unknown."""
    expected = max(_MIN_SECONDS, _TIMES * likely_seconds) if likely_seconds else max_seconds
    return min(max_seconds, expected)


class Watchdog:
    """Looks at the steps of lanes, and at jobs between them, on a thread of its own, until `stop`.

    max_seconds  that any step may take; a job may take as long, or what it says if that is more
    on_hang       is called with a sentence, once, on the event loop, which logs it; if that hangs, too, the
                  process exits
    """

    def __init__(self, lanes: Sequence[StepLane], max_seconds: float, on_hang: Callable[[str], None]) -> None:
        self._lanes, self._max_seconds = lanes, max_seconds
        self._on_hang = on_hang
        self._loop = asyncio.get_running_loop()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="expertd-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _run(self) -> None:
        looks = [partial(self._look, lane, *self._times()) for lane in self._lanes]
        while not self._stopped.wait(_LOOK_SECONDS):
            for look in looks:
                if (why := look()) is not None:
                    self._tell(why)
                    return

    def _times(self) -> tuple[StepTime, StepTime]:
        job = StepTime("the device", self._max_seconds, what="what runs between two steps")
        return StepTime("the device", self._max_seconds), job

    def _look(self, lane: StepLane, time_of_step: StepTime, time_of_job: StepTime) -> str | None:
        progress, likely = lane.step_in_flight()
        number, may_take = lane.job_in_flight()
        late = time_of_step.why_late(progress, limit_of(self._max_seconds, likely))
        return late or time_of_job.why_late(number, max(self._max_seconds, may_take))

    def _tell(self, why: str) -> None:
        told = threading.Event()

        def tell() -> None:
            told.set()
            self._on_hang(why)

        self._loop.call_soon_threadsafe(tell)
        if not told.wait(_ANSWER_SECONDS):
            logger.critical("%s, and the event loop too: exiting at once", why)
            os._exit(1)
