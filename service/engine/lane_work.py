"""What a worker thread does for a lane: jobs, steps and chores, each in its turn."""

import threading
import time
from collections.abc import Callable

from expertd.service.engine.delivery import Delivery
from expertd.service.engine.early_steps import EarlySteps
from expertd.service.engine.jobs import Jobs
from expertd.service.engine.lookout import Lookout
from expertd.service.engine.queues import Queues
from expertd.service.engine.stepping import Stepping
from expertd.service.engine.steps import Chunk, Pending, State
from expertd.service.engine.worker import Worker

_POLL_SECONDS = 100e-6  # how often a running step is checked for its end while others may begin
_RETURN_SECONDS = 20e-6  # in which a caller that waits for nothing else sends its next request
# On lanes but the first, the pause is at least this part of the step's likely time: polling takes the
# interpreter's lock, for which the first lane would wait.
_POLLED_PART = 1 / 8


class LaneWork:
    """For the worker thread, but for `take_alone` and `is_quiet`, which are for the event loop.

    lane       its number
    jobs       those between steps
    early      large steps beside others
    is_asleep  whether the thread sleeps, or is about to: it looks at its sources once more before
    has_ended  no further steps begin; both are set with the queues' lock
    turn       of the thread that uses the device
    worker     the thread, which may do the work of another lane, too
    """

    def __init__(
        self,
        lane: int,
        queues: Queues,
        stepping: Stepping,
        delivery: Delivery,
        lookout: Lookout,
        spin_seconds: float,
    ) -> None:
        self.lane, self._queues, self._stepping, self._delivery = lane, queues, stepping, delivery
        self._lookout = lookout
        self.jobs = Jobs()
        lookout.has_job = lambda: self.jobs.in_flight[0] is not None
        self.early = EarlySteps(queues, stepping)
        self._lock = queues.lock
        self.turn = threading.Lock()
        self.is_asleep = False
        self.has_ended = False
        self.worker = Worker(self, _name(lane), lane == 0, 0.0 if lane else spin_seconds)

    def wake_up(self) -> None:
        """The worker thread is awake, and no other is to run a step."""
        self.is_asleep = False

    def do_next(self) -> bool | None:
        """Do what is next without waiting; False if there is nothing at present, None after `end`."""
        running, chores = self._stepping.running, self._stepping.chores
        job: Callable[[], None] | None = None
        chunks: list[Chunk] = []
        late: list[Chunk] = []
        with self._lock:
            self._queues.just_ended = False
            if self.has_ended and not running and not chores:
                return None
            if not running:
                job = self.jobs.next()
            if job is None and self._may_begin():
                chunks, late = self._queues.split_late(self._queues.next_step(), self._stepping.busy_seconds)
                if chunks:
                    self._stepping.take(chunks)
            self.is_asleep = not (job or chunks or late or running or chores)
        if late:
            self._stepping.refuse_late(late)
        if not (job or chunks or chores):
            return bool(late)
        with self.turn:
            if job:
                self._stepping.do_chores()  # callers sleep until then, and a job may take long
                if self.worker.wakeup.sources:
                    self._lookout.job_begins()
                self._delivery.flush()
                job()
            elif chunks:
                if self.worker.wakeup.sources:
                    self._lookout.step_begins(chunks)
                self._stepping.begin(chunks)
            else:
                chores.popleft()()
        return True

    def finish_if_done(self) -> bool:
        """Answer the requests of the first step that runs, if the device has done it."""
        running = self._stepping.running
        if not running or not running[0].step.is_done():
            return False
        with self.turn:
            self._stepping.finish_first()
        return True

    def finish_next(self) -> None:
        """Wait for the first step that runs, and answer its requests; not if the next one may begin."""
        with self.turn:
            if self._delivery.leaves_reports:
                self._delivery.report_until(self._stepping.running[0].step.is_done)
            if not self._wait_for_more():
                self._stepping.finish_first()

    def finish_all(self) -> None:
        """Wait for all steps that run, and answer their requests."""
        while self.is_running:
            with self.turn:
                self._stepping.finish_first()

    @property
    def is_running(self) -> bool:
        """Whether the device has a step."""
        return bool(self._stepping.running)

    @property
    def answered(self) -> float:
        """When the last step's requests were."""
        return self._stepping.answered

    @property
    def busy_seconds(self) -> float:
        """Until the device has likely done all steps that run."""
        return self._stepping.busy_seconds()

    @property
    def num_reports(self) -> int:
        """That wait to be called."""
        return self._delivery.num_reports

    def report_one(self) -> bool:
        """Call what has been reported first; False if there is nothing."""
        return self._delivery.report_one()

    def flush(self) -> None:
        """Have the event loop call what has been reported."""
        self._delivery.flush()

    def cancel_jobs(self) -> None:
        """Cancel those that no thread will run."""
        self.jobs.cancel()

    def wait_for_callers(self) -> None:
        """Poll sources until the callers of the last step are back, for a short time.

        If others wait, the next step has all of them then. If none wait, chores are left until then: they
        would be in the next request's way.
        """
        stepping = self._stepping
        if not stepping.returning or stepping.running:
            return
        until = stepping.answered + min(_RETURN_SECONDS, self.worker.spin_seconds)
        while not self._queues.turns:
            if time.perf_counter() >= until:
                return
            self.worker.poll(0)
        while stepping.returning and time.perf_counter() < stepping.rejoin_until:
            self.worker.poll(0)
            if stepping.chores:
                stepping.chores.popleft()()
        stepping.returning = 0

    def _may_begin(self) -> bool:
        """Whether the next step may begin now. The caller holds the lock."""
        running = self._stepping.running
        if not running:
            return bool(self._queues.turns)
        return not (self.has_ended or self.jobs) and self.early.may_begin()

    def _wait_for_more(self) -> bool:
        """Wait until the first step that runs is done; True as soon as the next one may begin."""
        running, until = self._stepping.running, self.early.polled_until()
        pause = _POLL_SECONDS
        if self.lane and until:
            pause = max(pause, _POLLED_PART * self._stepping.first_times()[1])
        while (now := time.perf_counter()) < until and not running[0].step.is_done():
            if self.worker.wakeup.sources:
                self.worker.poll(0)
            with self._lock:
                if self._may_begin():
                    return True
                begins = self.early.begins()
            time.sleep(min(pause, max(_POLL_SECONDS, min(begins, until) - now)))
        return False

    def take_alone(self, pending: Pending) -> Chunk | None:
        """Take a request's step, and the turn, unless the worker thread is awake or more has arrived."""
        with self._lock:
            if pending.state is not State.WAITING:
                return None
            asleep = self.is_asleep
            alone = asleep and self._queues.is_alone(pending) and not self.jobs
            # Never held for long: a worker that wakes up now waits for this step.
            if alone and self.turn.acquire(blocking=False):
                return self._queues.next_step()[0]
            self.is_asleep = False
        if asleep:
            self.worker.wakeup.wake()
        return None

    def is_quiet(self) -> bool:
        """Whether the worker thread sleeps, and nothing waits."""
        return self.is_asleep and not self._queues.turns


def _name(lane: int) -> str:
    """Of a worker thread."""
    return f"expertd-worker-{lane}" if lane else "expertd-worker"
