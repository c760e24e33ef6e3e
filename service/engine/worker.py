"""The thread that runs a lane's steps; on a GPU, those of both lanes.

A GPU computes a step by itself, and the thread does the other lane's work meanwhile. With a thread for each
lane, one would wait for the other: the interpreter has one lock for all threads, and one that waits for it
sleeps, and may wake up 0.3 ms late. A CPU computes a step on the thread, so there each lane has its own.
"""

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from expertd.service.engine.wakeup import RequestSource, Wakeup

logger = logging.getLogger(__name__)

# The other lane's next step is launched at the latest when the device has less than this to do.
_LAUNCH_SECONDS = 0.4e-3
_MAX_REPORTS = 64  # that wait for a step to run; more are called while the next request is awaited, too
_QUIET_SECONDS = 1e-3  # idle time after which all reports run
_PAUSE_SECONDS = 50e-6  # between two looks at steps, if no short request is expected at once
_HELD_SECONDS = 200e-6  # between two turns of calls, while another thread holds them
_SET_TIMER_SLACK = 29  # of prctl


class WorkerTask(Protocol):
    """What a thread does for a lane: a `StepLane`. It never waits, but in `finish_next`."""

    @property
    def is_asleep(self) -> bool: ...
    @property
    def is_running(self) -> bool: ...
    @property
    def answered(self) -> float: ...
    @property
    def busy_seconds(self) -> float: ...
    def wake_up(self) -> None: ...
    def wait_for_callers(self) -> None: ...
    def do_next(self) -> bool | None: ...
    def finish_if_done(self) -> bool: ...
    def finish_next(self) -> None: ...
    @property
    def num_reports(self) -> int: ...
    def report_one(self) -> bool: ...
    def flush(self) -> None: ...
    def cancel_jobs(self) -> None: ...
    def answer_calls(self) -> bool: ...
    def stop_calls(self) -> None: ...


class WorkerThread:
    """A thread, and where it waits.

    first         the lane whose requests it waits for
    rings_wake    whether it wakes up for requests of sources, or reads them only while it is awake
    spin_seconds  for which it looks for them before it sleeps
    leaves        whether it leaves it to another thread to poll a source
    on_failure    is called with a sentence if the thread ends by an error, which is none of a step's
    """

    def __init__(self, first: WorkerTask, name: str, rings_wake: bool, spin_seconds: float) -> None:
        self.wakeup = Wakeup(rings_wake)
        self.spin_seconds = spin_seconds
        self.leaves: Callable[[RequestSource], bool] = lambda source: False
        self.on_failure: Callable[[str], object] = lambda why: None
        self.thread = threading.Thread(target=self._run_or_tell, name=name, daemon=True)
        self._first, self._rings_wake = first, rings_wake
        self._second: WorkerTask | None = None
        self._retires = False
        self._awake_until = 0.0

    def retire(self) -> None:
        """End the thread, which has nothing to do: another one will do the lane's work."""
        self._retires = True
        self.wakeup.wake()
        self.thread.join()
        self.wakeup.close()

    def take(self, second: WorkerTask) -> None:
        """Do the work of another lane, too, from now on; its thread has retired."""
        self._second = second
        self.wakeup.wake()

    def poll(self, seconds: float | None) -> bool:
        """Wait up to `seconds`, and poll the sources that rang; False if nothing happened."""
        rang = self.wakeup.wait(seconds)
        if rang is None:
            return False
        self._stay_awake()
        self._first.wake_up()
        for source in rang:
            if not self.leaves(source):
                source.poll()
        return True

    def _run_or_tell(self) -> None:
        # Linux adds 50 us to a sleep of this thread otherwise.
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, ctypes.c_ulong(1), 0, 0, 0)
        try:
            self._run()
        except Exception as error:
            logger.exception("the thread of the steps has failed")
            self.on_failure(f"the thread of the steps has failed: {type(error).__name__}")

    def _run(self) -> None:
        first = self._first
        has_polled = False
        while not self._retires:
            if self.wakeup.sources:
                if not has_polled:  # a poll lets other threads run
                    self.poll(0)
                if self._rings_wake:
                    first.wait_for_callers()
            has_polled = False
            did = first.do_next()
            if did is None:
                break
            if did:
                self._stay_awake()
            elif not first.is_running:
                has_polled = self._wait()
            elif self._second is None:
                first.finish_next()
                self._stay_awake()
            elif first.finish_if_done():
                self._stay_awake()
            elif not (_go_on(self._second) or self._report_one() or self._ends_soon()):
                time.sleep(_PAUSE_SECONDS)
        if not self._retires:
            self._end()

    def _stay_awake(self) -> None:
        """The caller of what has just been done may send its next request soon."""
        self._awake_until = time.perf_counter() + self.spin_seconds

    def _wait(self) -> bool:
        """Wait for a wake-up or a source: awake for a short time, then asleep.

        False if there was none, but work of the second lane, which may have deferred calls.
        """
        second = self._second
        answers = self._first.answer_calls()
        if self.wakeup.sources:
            quiet_from = self._awake_until - self.spin_seconds + _QUIET_SECONDS
            while (now := time.perf_counter()) < self._awake_until:
                if self.poll(0):
                    return True
                if second is not None and not self._expects_more() and _go_on(second):
                    return False
                if now >= quiet_from or sum([lane.num_reports for lane in self._lanes]) > _MAX_REPORTS:
                    self._report_one()
            # What was left to this thread while it was awake.
            if not self._rings_wake and self.poll(0):
                return True
        while second is not None and not second.is_asleep:
            if _go_on(second):
                return False
            if not self._report_one():
                time.sleep(_PAUSE_SECONDS)
            if self.poll(0):
                return True
        for lane in self._lanes:
            lane.flush()
        while not answers:
            if self.poll(_HELD_SECONDS):
                return True
            answers = self._first.answer_calls()
        return self.poll(None)

    def _report_one(self) -> bool:
        """Call what a lane has reported first: metrics, which wait for a moment that nothing else needs."""
        return any(lane.report_one() for lane in self._lanes)

    @property
    def _lanes(self) -> list[WorkerTask]:
        return [self._first] if self._second is None else [self._first, self._second]

    def _ends_soon(self) -> bool:
        """Whether the caller of a step that runs may send its next request at once; not if it is overdue."""
        if not self.wakeup.sources:
            return False
        if self._first.busy_seconds > _LAUNCH_SECONDS:
            self._stay_awake()
            return False
        return time.perf_counter() < self._awake_until

    def _expects_more(self) -> bool:
        """Whether the second lane's work would delay a request of the first, and can wait."""
        second = self._second
        assert second is not None
        is_recent = time.perf_counter() - self._first.answered < self.spin_seconds
        return is_recent and second.busy_seconds > _LAUNCH_SECONDS

    def _end(self) -> None:
        lanes = self._lanes
        for lane in lanes[1:]:
            while lane.do_next() is not None:
                if lane.is_running:
                    lane.finish_next()
        lanes[0].stop_calls()
        self.wakeup.close()
        for lane in lanes:
            lane.cancel_jobs()
        for lane in lanes:
            lane.flush()


def _go_on(lane: WorkerTask) -> bool:
    """Do what is next for a lane without waiting; False if there is nothing at present."""
    return bool(lane.do_next()) or lane.finish_if_done()
