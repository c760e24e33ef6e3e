"""One thread for two lanes: when it does the second one's work."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from expertd.service.engine.worker import WorkerThread
from tests.service.engine.test_wakeup import Bell
from tests.service.waiting import wait_for


class FakeLane:
    """A lane with as much to do as a test says, which counts what is done.

    to_do      things to do
    runs       whether a step runs; it is done when `step_done` is set
    answered   when the last request was
    done_at    when the last thing was
    """

    def __init__(self, busy_seconds: float = 0.0) -> None:
        self.to_do = self.done = 0
        self.runs = False
        self.step_done = threading.Event()
        self.busy_seconds = busy_seconds
        self.answered = self.done_at = -1e9
        self.is_over = False

    @property
    def is_asleep(self) -> bool:
        return not self.to_do and not self.runs

    @property
    def is_running(self) -> bool:
        return self.runs

    def do_next(self) -> bool | None:
        if self.to_do:
            self.to_do -= 1
            self.done += 1
            self.done_at = time.perf_counter()
            return True
        return None if self.is_over and not self.runs else False

    def finish_if_done(self) -> bool:
        if not self.runs or not self.step_done.is_set():
            return False
        self.runs = False
        return True

    def finish_next(self) -> None:
        self.step_done.wait()
        self.runs = False

    def wake_up(self) -> None: ...
    def wait_for_callers(self) -> None: ...
    def cancel_jobs(self) -> None: ...
    def answer_calls(self) -> bool:
        return True

    def stop_calls(self) -> None: ...

    num_reports = 0

    def report_one(self) -> bool:
        return False

    def flush(self) -> None: ...


@contextmanager
def working(first: FakeLane, second: FakeLane, spin_seconds: float) -> Iterator[WorkerThread]:
    worker, bell = WorkerThread(first, "both", True, spin_seconds), Bell()
    worker.wakeup.add(bell)
    worker.take(second)
    worker.thread.start()
    try:
        yield worker
    finally:
        for lane in (first, second):
            lane.step_done.set()
            lane.is_over = True
        worker.wakeup.wake()
        worker.thread.join(60)
        bell.close()
        assert not worker.thread.is_alive()


def test_what_can_wait_leaves_the_thread_to_short_requests() -> None:
    """The next one is likely to come soon."""
    first, second = FakeLane(), FakeLane(busy_seconds=60.0)
    first.answered = time.perf_counter()
    second.to_do = 1
    with working(first, second, spin_seconds=0.3):
        wait_for(lambda: second.done == 1, "none has come")
    assert second.done_at - first.answered >= 0.3


def test_the_device_does_not_run_out_of_work() -> None:
    first, second = FakeLane(), FakeLane(busy_seconds=0.1e-3)
    first.answered = time.perf_counter()
    second.to_do = 1
    with working(first, second, spin_seconds=3600.0):
        wait_for(lambda: second.done == 1, "the second one's work is done")


def test_the_second_lanes_work_is_done_while_a_step_of_the_first_runs() -> None:
    first, second = FakeLane(), FakeLane(busy_seconds=60.0)
    first.runs, second.to_do = True, 3
    first.answered = time.perf_counter()
    with working(first, second, spin_seconds=0.3):
        wait_for(lambda: second.done == 3, "the second one's work is done")
        assert first.runs
        first.step_done.set()
        first.to_do = 1
        wait_for(lambda: first.done == 1, "the first one's, too")
