"""One lane: a queue for each model, and what a worker thread does for it: jobs, steps, deferred calls.

Requests that arrive while the device is busy are batched into the model's next step, in the order of
`queues`, which also chooses the model. A large step begins while another one runs, so that its bytes travel
meanwhile; small ones wait, because more requests may join them. While small requests come, too, a large step
begins only shortly before the other one ends: one that has begun is one more that they wait for. Work that
must not overlap a step (loading, replacing SM partitions) runs on the same thread, between steps.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from expertd.service.engine.calls import Calls, NoCalls
from expertd.service.engine.completions import Completions
from expertd.service.engine.early_steps import EarlySteps
from expertd.service.engine.errors import ExecutorClosedError
from expertd.service.engine.jobs import JOB_SECONDS, Jobs
from expertd.service.engine.long_steps import LongStepPoller
from expertd.service.engine.metrics.steps import QueueState
from expertd.service.engine.queues import Queues
from expertd.service.engine.short_steps import ShortSteps
from expertd.service.engine.stepping import StepRunner
from expertd.service.engine.steps import Chunk, State, StepObserver, Submission, num_tokens_of
from expertd.service.engine.worker import WorkerThread
from expertd.service.settings.parts import Limits

T = TypeVar("T")

_POLL_SECONDS = 100e-6  # how often a running step is checked for its end while others may begin
_RETURN_SECONDS = 20e-6  # in which a caller that waits for nothing else sends its next request
# On lanes but the first, the pause is at least this part of the step's likely time: polling takes the
# interpreter's lock, for which the first lane would wait.
_POLLED_PART = 1 / 8


class StepLane:
    """`submit`, `cancel` and what tells its state are safe from any thread; the rest is the worker thread's.

    number     of the lane. The worker thread of the first one wakes up for requests of sources, that of
               another one polls its own only while it is awake
    jobs       those between steps
    early      large steps while others run
    is_asleep  whether the thread sleeps, or is about to: it looks at its sources once more before
    is_closed  new requests are refused
    has_ended  no further steps begin; all three are set with the queues' lock
    device     held by the thread that uses the device
    calls      those that GPUs of callers make by themselves, which the device answers meanwhile
    worker     the thread, which may do the work of another lane, too
    """

    def __init__(
        self,
        limits: Limits,
        observer: StepObserver,
        spin_seconds: float = 0.0,
        number: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.number = number
        self.clock = clock
        self.queues = queues = Queues(limits, clock)
        self.completions = completions = Completions()
        self.stepping = stepping = StepRunner(queues, completions, observer, clock)
        self.jobs = Jobs()
        self.early = EarlySteps(queues, stepping, clock)
        self.device = threading.Lock()
        self.calls: Calls = NoCalls()
        self.is_asleep = self.is_closed = self.has_ended = False
        self.worker = WorkerThread(self, _name(number), number == 0, 0.0 if number else spin_seconds)
        self.poller = LongStepPoller(queues, stepping, completions, self.poll_sources)
        self.poller.has_job = lambda: self.jobs.in_flight[0] is not None
        self._short = ShortSteps(
            queues, stepping, completions, self.device, self.take_alone, self.is_quiet, clock
        )
        self._lock = queues.lock  # also of the jobs, of the early steps, and of what is set here

    # Requests and jobs.

    def submit(self, submission: Submission) -> None:
        """Put a request in its queue. Raises an EngineError."""
        submission.accept(self.clock(), self.number)
        with self._lock:
            self.check_open()
            queue = self.queues.add(submission, self.stepping.busy_seconds)
            self.early.note(submission)
            self.completions.accepted()
            if submission.on_worker and self.stepping.returning:
                self.stepping.returning -= 1
            if submission.alone and self.is_asleep and self._short.fits(queue, submission.timeout):
                self._short.run_soon(submission)
                return
            asleep, self.is_asleep = self.is_asleep, False
        if asleep:
            self.worker.wakeup.wake()

    def cancel(self, submission: Submission, error: Exception) -> bool:
        """Answer a queued request with `error`; False if its step has begun or it is already answered.

        A request of which a step computes a chunk is answered after that step, and the rest is not computed.
        """
        with self._lock:
            if not self.queues.remove(submission):
                return False
            if submission.running:
                submission.error = error
                return True
        submission.done(error)
        self.completions.answered()
        return True

    def check_capacity(self, model: str, num_tokens: int = 1, caller: int = 0) -> None:
        """Raise QueueFullError or ExecutorClosedError if a request of `num_tokens` would be refused now."""
        self.check_open()
        self.queues.check_room(model, num_tokens, caller)

    def check_open(self) -> None:
        """Raise ExecutorClosedError if new requests are refused."""
        if self.is_closed:
            raise ExecutorClosedError("the server is shutting down")

    def do_between_steps(self, job: Callable[[], T], may_take: float = JOB_SECONDS) -> "Future[T]":
        """Run `job` on the worker thread before the next step. Raises ExecutorClosedError after `end`.

        may_take  seconds, if the step timeout is not more: after that, or the last `jobs.goes_on`, it hangs

        Its result is the error of `give_up` if that comes before its own.
        """
        with self._lock:
            if self.has_ended:
                raise ExecutorClosedError("the server is shutting down")
            done = self.jobs.add(job, may_take)
            self.is_asleep = False
        self.worker.wakeup.wake()
        return done

    def waiting(self, model: str | None = None) -> list[Submission]:
        """The requests in the queue of a model; None: of all."""
        with self._lock:  # the worker thread takes some
            return self.queues.all_waiting(model)

    def cancel_all(self, error: Exception, model: str | None = None) -> None:
        """Answer every queued request, or those to a model, with `error`."""
        for submission in self.waiting(model):
            self.cancel(submission, error)

    def give_up(self, error: Exception) -> None:
        """Answer every request and job with `error`, also those that never end; on the event loop."""
        with self._lock:
            self.is_closed = True
            self.jobs.give_up(error)
            stuck = dict.fromkeys(chunk.submission for chunk in self.stepping.unfinished())
            open_ones = [submission.take_done() for submission in stuck]
        self.cancel_all(error)
        for done in open_ones:
            done(error)

    def close(self) -> None:
        """Refuse new requests; accepted ones are still answered."""
        with self._lock:  # another thread may be accepting one
            self.is_closed = True

    def end(self) -> None:
        """Have the worker thread end this lane's work after its current steps."""
        with self._lock:
            self.is_closed = self.has_ended = True
        self.worker.wakeup.wake()

    # Its state.

    def queue_state(self, model: str) -> QueueState:
        """For metrics; of a model that is not loaded, too."""
        queue = self.queues.get(model)
        waiting = (0, 0) if queue is None else (queue.num_requests, queue.num_tokens)
        return QueueState(*waiting, self.queues.num_chunks(model))

    def failures(self, model: str) -> int:
        """The number of consecutive failed steps of `model`, up to now; 0 if it is not loaded."""
        queue = self.queues.get(model)
        return 0 if queue is None else queue.failures

    def step_in_flight(self) -> tuple[int | None, float]:
        """A number of the first step in flight, None: there is none; and its likely seconds, 0: unknown."""
        progress = self.stepping.progress
        if not (chunks := self.stepping.in_flight()):
            return None, 0.0
        if (queue := self.queues.get(chunks[0].submission.model)) is None:  # unloaded since
            return None, 0.0
        return progress, queue.likely_seconds(num_tokens_of(chunks))

    def job_in_flight(self) -> tuple[int | None, float]:
        """A number of the job that runs, None: there is none; and the seconds that it may take."""
        return self.jobs.in_flight

    @property
    def thread_id(self) -> int | None:
        """The operating system's number of the worker thread; None before it starts."""
        return self.worker.thread.native_id

    @property
    def is_here(self) -> bool:
        """Whether the worker thread asks."""
        return threading.get_ident() == self.worker.thread.ident

    # The worker thread.

    def poll_sources(self) -> None:
        """Poll every source once, so that what has arrived is accepted, even during a step; on any thread."""
        for source in self.worker.wakeup.all():
            source.poll()

    def do_deferred(self) -> None:
        """Do all of `stepping.deferred`, and have what is reported called."""
        self.stepping.do_deferred()
        self.completions.flush()

    def wake_up(self) -> None:
        """The worker thread is awake, and no other is to run a step."""
        self.is_asleep = False

    def do_next(self) -> bool | None:
        """Do what is next without waiting; False if there is nothing at present, None after `end`."""
        running, deferred = self.stepping.running, self.stepping.deferred
        job: Callable[[], None] | None = None
        chunks: list[Chunk] = []
        late: list[Chunk] = []
        with self._lock:
            self.queues.just_ended = False
            if self.has_ended and not running and not deferred:
                return None
            if not running:
                job = self.jobs.next()
            if job is None and self._may_begin():
                chunks, late = self.queues.split_late(self.queues.next_step(), self.stepping.busy_seconds)
                if chunks:
                    self.stepping.take(chunks)
            self.is_asleep = not (job or chunks or late or running or deferred)
        if late:
            self.stepping.refuse_late(late)
        if not (job or chunks or deferred):
            return bool(late)
        with self.device:
            if job:
                self.calls.stop()
                self.stepping.do_deferred()  # callers sleep until then, and a job may take long
                if self.worker.wakeup.sources:
                    self.poller.job_begins()
                self.completions.flush()
                job()
            elif chunks:
                if self.worker.wakeup.sources:
                    self.poller.step_begins(chunks)
                if not running:
                    self.calls.run()  # those that are there have their turn before each step
                self.stepping.begin(chunks)
            else:
                deferred.popleft()()
        return True

    def answer_calls(self) -> bool:
        """Have the device answer calls, as there is nothing else to do; False: call it again soon."""
        if not self.calls.are_made:  # without waiting for a step of the event loop
            return True
        with self.device:
            return self.calls.start()

    def stop_calls(self) -> None:
        """Have the device answer no more calls."""
        with self.device:
            self.calls.stop()

    def finish_if_done(self) -> bool:
        """Answer the requests of the first step that runs, if the device has done it."""
        running = self.stepping.running
        if not running or not running[0].step.is_done():
            return False
        with self.device:
            self.stepping.finish_first()
        return True

    def finish_next(self) -> None:
        """Wait for the first step that runs, and answer its requests; not if the next one may begin."""
        with self.device:
            if self.completions.leaves_reports:
                self.completions.report_until(self.stepping.running[0].step.is_done)
            if not self._wait_for_more():
                self.stepping.finish_first()

    def finish_all(self) -> None:
        """Wait for all steps that run, and answer their requests."""
        while self.is_running:
            with self.device:
                self.stepping.finish_first()

    @property
    def is_running(self) -> bool:
        """Whether the device has a step."""
        return bool(self.stepping.running)

    @property
    def answered(self) -> float:
        """When the last step's requests were."""
        return self.stepping.answered

    @property
    def busy_seconds(self) -> float:
        """Until the device has likely done all steps that run."""
        return self.stepping.busy_seconds()

    @property
    def num_reports(self) -> int:
        """The number of queued reports."""
        return self.completions.num_reports

    def report_one(self) -> bool:
        """Call what has been reported first; False if there is nothing."""
        return self.completions.report_one()

    def flush(self) -> None:
        """Have the event loop call what has been reported."""
        self.completions.flush()

    def cancel_jobs(self) -> None:
        """Cancel those that no thread will run."""
        self.jobs.cancel()

    def wait_for_callers(self) -> None:
        """Poll sources until the callers of the last step are back, for a short time.

        If others wait, the next step has all of them then. If none wait, deferred calls are left until then:
        they would be in the next request's way.
        """
        stepping = self.stepping
        if not stepping.returning or stepping.running:
            return
        until = stepping.answered + min(_RETURN_SECONDS, self.worker.spin_seconds)
        while not self.queues.waiting_models:
            if self.clock() >= until:
                return
            self.worker.poll(0)
        while stepping.returning and self.clock() < stepping.rejoin_until:
            self.worker.poll(0)
            if stepping.deferred:
                stepping.deferred.popleft()()
        stepping.returning = 0

    def _may_begin(self) -> bool:
        """Whether the next step may begin now. The caller holds the lock."""
        running = self.stepping.running
        if not running:
            return bool(self.queues.waiting_models)
        return not (self.has_ended or self.jobs) and self.early.may_begin()

    def _wait_for_more(self) -> bool:
        """Wait until the first step that runs is done; True as soon as the next one may begin."""
        running, until = self.stepping.running, self.early.polled_until()
        pause = _POLL_SECONDS
        if self.number and until:
            pause = max(pause, _POLLED_PART * self.stepping.first_times()[1])
        while (now := self.clock()) < until and not running[0].step.is_done():
            if self.worker.wakeup.sources:
                self.worker.poll(0)
            with self._lock:
                if self._may_begin():
                    return True
                begins = self.early.begins()
            time.sleep(min(pause, max(_POLL_SECONDS, min(begins, until) - now)))
        return False

    def take_alone(self, submission: Submission) -> Chunk | None:
        """Take a request's step, and `device`, unless the worker thread is awake or more has arrived."""
        with self._lock:
            if submission.state is not State.WAITING:
                return None
            asleep = self.is_asleep
            alone = asleep and self.queues.is_alone(submission) and not self.jobs
            alone = alone and not self.calls.are_made
            # Never held for long: a worker that wakes up now waits for this step.
            if alone and self.device.acquire(blocking=False):
                return self.queues.next_step()[0]
            self.is_asleep = False
        if asleep:
            self.worker.wakeup.wake()
        return None

    def is_quiet(self) -> bool:
        """Whether the worker thread sleeps, and nothing waits."""
        return self.is_asleep and not self.queues.waiting_models


def _name(lane: int) -> str:
    """The name of a lane's worker thread."""
    return f"expertd-worker-{lane}" if lane else "expertd-worker"
