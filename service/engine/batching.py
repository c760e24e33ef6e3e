"""A queue per model, and one worker thread that runs the queued requests on the device in steps.

Requests that arrive while the device is busy are batched into the model's next step, in the order of
`queues`, which also chooses the model. A large step begins while another one runs, so that its bytes travel
meanwhile; small ones wait, because more requests may join them. While small requests come, too, a large step
begins only shortly before the other one ends: one that has begun is one more that they wait for. Work that
must not overlap a step (loading, replacing SM partitions) runs on the same thread, between steps.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from expertd.service.engine.delivery import Delivery
from expertd.service.engine.errors import EngineError, SchedulerClosedError
from expertd.service.engine.jobs import JOB_SECONDS
from expertd.service.engine.lane_work import LaneWork
from expertd.service.engine.lookout import Lookout
from expertd.service.engine.metrics.steps import QueueState
from expertd.service.engine.queue_counts import Backlog
from expertd.service.engine.queues import Queues
from expertd.service.engine.short_steps import ShortSteps
from expertd.service.engine.stepping import Stepping
from expertd.service.engine.steps import DEFAULT_PRIORITY, Done, Pending, Runner, StepObserver, num_tokens_of
from expertd.service.engine.wakeup import Source
from expertd.service.engine.worker import Worker
from expertd.service.moe.request import LayerRequest
from expertd.service.settings.parts import Limits

T = TypeVar("T")


class Scheduler:
    """Owns the queues and the worker thread. `submit` and `cancel` are safe from any thread.

    lane          the number of its lane; 0 if there is only one. The worker thread of the first lane wakes
                  up for requests of sources, that of another one polls its own only while it is awake
    spin_seconds  for which the first lane's thread looks for requests of sources before it sleeps
    """

    # How long a thread waits before it asks another one for Python's lock; by default 5 ms, which would make
    # timeouts late.
    switch_seconds = 1e-3

    def __init__(
        self, limits: Limits, observer: StepObserver, spin_seconds: float = 0.0, lane: int = 0
    ) -> None:
        self._queues = Queues(limits)
        self._delivery = Delivery()
        self._stepping = Stepping(self._queues, self._delivery, observer)
        self._lookout = Lookout(self._queues, self._stepping, self._delivery, self.poll_sources)
        self.lane = lane
        self._work = work = LaneWork(
            lane, self._queues, self._stepping, self._delivery, self._lookout, spin_seconds
        )
        self._short = ShortSteps(
            self._queues, self._stepping, self._delivery, work.turn, work.take_alone, work.is_quiet
        )
        self._lock = self._queues.lock  # also of the jobs, of `_closed`, and of what `work` has
        self._closed = False

    @property
    def lanes(self) -> tuple["Scheduler", ...]:
        """Itself: the only lane; see `Lanes`."""
        return (self,)

    @property
    def worker(self) -> Worker:
        """The thread, which may do the work of another lane, too."""
        return self._work.worker

    def start(self) -> None:
        """Start the worker thread; answers are delivered to the running event loop."""
        self._delivery.start()
        self.worker.thread.start()

    def set_runners(self, runners: Mapping[str, Runner], weights: Mapping[str, float] | None = None) -> None:
        """Set the runner of each model, and its share of the device beside others; by default 1."""
        self._queues.set_runners(runners, weights or {})

    def set_most_running(self, count: int) -> None:
        """Set how many steps the runners take at a time, at least 2; before the first request."""
        self._work.early.most = count

    def watch_device(self, failure: Callable[[], str | None], on_failure: Callable[[str], None]) -> None:
        """After a failed step, ask `failure`; if it says why the device has failed, tell `on_failure`.

        That is called on the event loop, at least once. Requests get DeviceFailedError.
        """
        self._stepping.failure, self._stepping.on_failure = failure, on_failure

    def watch_worker(self, on_failure: Callable[[str], None]) -> None:
        """If the worker thread ends by an error, tell `on_failure`, on the event loop, why."""
        loop = self._delivery.loop
        self.worker.on_failure = lambda why: loop.call_soon_threadsafe(on_failure, why)

    def set_device(self, spin_seconds: float, leaves_cpu: bool) -> None:
        """Tell of the device: spin_seconds as when it was made.

        leaves_cpu  steps leave the CPU alone, so the worker thread calls reports while one runs: the event
                    loop, with the interpreter's lock, would be in its way when it begins the next one
        """
        self.worker.spin_seconds = 0.0 if self.lane else spin_seconds
        self._delivery.leaves_reports = leaves_cpu

    def take(self, other: "Scheduler") -> None:
        """Have this worker thread do the work of another lane, too, which has none at present."""
        other.worker.retire()
        other._work.worker = self.worker
        other._delivery.leaves_reports = self._delivery.leaves_reports
        self.worker.take(other._work)

    def tell_changes(self, on_change: Callable[[str, int, Backlog], None]) -> None:
        """Call `on_change`, on any thread, with a model, the lane, and what waits, whenever that changes."""
        with self._lock:
            self._queues.on_change = lambda model, backlog: on_change(model, self.lane, backlog)

    def add_runner(self, model: str, runner: Runner, weight: float = 1.0) -> None:
        """Serve one more model."""
        with self._lock:
            self._queues.add_runner(model, runner, weight)

    def explain_missing(self, why: Callable[[str], EngineError]) -> None:
        """Refuse requests to a model without a runner with the error that `why` says."""
        self._queues.why_missing = why

    def refuse_new(self, model: str) -> None:
        """Refuse new requests to `model` with ModelUnloadedError; accepted ones are still answered."""
        with self._lock:
            self._queues[model].is_closed = True

    def remove_runner(self, model: str) -> bool:
        """Forget the runner of `model`, between steps; False if requests wait for it."""
        self.do_chores()  # of its last step; what is reported of steps refers to their layer
        with self._lock:
            return self._queues.remove_runner(model)

    def runner(self, model: str) -> Runner:
        """The runner of `model`. Raises ModelUnloadedError, or NotReadyError while it is loading."""
        return self._queues[model].runner

    async def between_steps(self, job: Callable[[], T], may_take: float = JOB_SECONDS) -> T:
        """Run `job` on the worker thread before the next step, and return its result."""
        return await asyncio.wrap_future(self.do_between_steps(job, may_take))

    def do_between_steps(self, job: Callable[[], T], may_take: float = JOB_SECONDS) -> "Future[T]":
        """Run `job` on the worker thread before the next step. Raises SchedulerClosedError after `stop`.

        may_take  seconds, if the step timeout is not more: after that, or the last `job_goes_on`, it hangs

        Its result is the error of `give_up` if that comes before its own.
        """
        with self._lock:
            if self._work.has_ended:
                raise SchedulerClosedError("the server is shutting down")
            done = self._work.jobs.add(job, may_take)
            self._work.is_asleep = False
        self.worker.wakeup.wake()
        return done

    def check_capacity(self, model: str, num_tokens: int = 1, caller: int = 0) -> None:
        """Raise QueueFullError or SchedulerClosedError if a request of `num_tokens` would be refused now."""
        self._check_open()
        self._queues.check_room(model, num_tokens, caller)

    def submit(
        self,
        model: str,
        request: LayerRequest,
        done: Done,
        on_worker: bool = False,
        alone: bool = False,
        priority: int = DEFAULT_PRIORITY,
        caller: int = 0,
        timeout: float | None = None,
    ) -> Pending:
        """Put `request` in the model's queue. Raises as `check_capacity` does.

        `done` is called on the event loop, or directly on the worker thread: then it must return soon,
        because the next step waits for it. It must not raise.

        alone     the event loop has no other requests at present: if nothing else runs and the step is likely
                  to be short, it runs there, after all that has arrived there; not with a short timeout
        priority  1 to 255; lower ones are computed first
        caller    `caller_number`: those with waiting requests get equal shares
        timeout   seconds after which the output is of no use: if that is likely, it is not computed
        """
        pending = Pending(model, request, done, on_worker, priority, caller, self.lane, timeout)
        with self._lock:
            self._check_open()
            queue = self._queues.add(pending, self._stepping.busy_seconds)
            self._work.early.note(pending)
            self._delivery.accepted()
            if on_worker and self._stepping.returning:
                self._stepping.returning -= 1
            if alone and self._work.is_asleep and self._short.fits(queue, timeout):
                self._short.run_soon(pending)
                return pending
            asleep, self._work.is_asleep = self._work.is_asleep, False
        if asleep:
            self.worker.wakeup.wake()
        return pending

    def cancel(self, pending: Pending, error: Exception) -> bool:
        """Answer a queued request with `error`; False if its step has begun or it is already answered.

        A request of which a step computes a chunk is answered after that step, and the rest is not computed.
        """
        with self._lock:
            if not self._queues.remove(pending):
                return False
            if pending.running:
                pending.error = error
                return True
        pending.done(error)
        self._delivery.answered()
        return True

    def add_source(self, source: Source) -> None:
        """Have the worker thread poll `source`, from now on."""
        self.worker.wakeup.add(source)

    def remove_source(self, source: Source) -> None:
        """Poll `source` no more, once a poll that has begun is over."""
        self.worker.wakeup.remove(source)

    def poll_sources(self) -> None:
        """Poll every source once, so that what has arrived is accepted, even during a step."""
        for source in self.worker.wakeup.all():
            source.poll()

    def do_later(self, chore: Callable[[], None]) -> None:
        """Call `chore` on the worker thread, once the next step runs or if there is none; for that thread."""
        self._stepping.chores.append(chore)

    def report_later(self, report: Callable[[], None]) -> None:
        """Call `report` soon, where it delays no step; for the worker thread."""
        self._delivery.report_later(report)

    def waiting(self, model: str) -> tuple[int, int]:
        """The numbers of queued requests and tokens of `model`."""
        queue = self._queues[model]
        return queue.num_requests, queue.num_tokens

    def queue_state(self, model: str) -> QueueState:
        """For metrics; of a model that is not loaded, too."""
        queue = self._queues.get(model)
        waiting = (0, 0) if queue is None else (queue.num_requests, queue.num_tokens)
        return QueueState(*waiting, self._queues.num_chunks(model))

    def step_in_flight(self) -> tuple[int | None, float]:
        """A number of the first step in flight, None: there is none; and its likely seconds, 0: unknown."""
        progress = self._stepping.progress
        if not (chunks := self._stepping.in_flight()):
            return None, 0.0
        if (queue := self._queues.get(chunks[0].pending.model)) is None:  # unloaded since
            return None, 0.0
        return progress, queue.likely_seconds(num_tokens_of(chunks))

    def job_in_flight(self) -> tuple[int | None, float]:
        """A number of the job that runs, None: there is none; and the seconds that it may take."""
        return self._work.jobs.in_flight

    def job_goes_on(self) -> None:
        """The job that runs has done a part, and its time begins again; for the worker thread."""
        self._work.jobs.goes_on()

    def give_up(self, error: Exception) -> None:
        """Answer every request and job with `error`, also those that never end; on the event loop."""
        self.close()
        with self._lock:
            self._work.jobs.give_up(error)
            stuck = dict.fromkeys(chunk.pending for chunk in self._stepping.unfinished())
            open_ones = [pending.take_done() for pending in stuck]
        for pending in self._waiting():
            self.cancel(pending, error)
        for done in open_ones:
            done(error)

    def failures(self, model: str) -> int:
        """The number of consecutive failed steps of `model`, up to now; 0 if it is not loaded."""
        queue = self._queues.get(model)
        return 0 if queue is None else queue.failures

    def close(self) -> None:
        """Refuse new requests; accepted ones are still answered, and counted in `unanswered` from now on."""
        with self._lock:  # another thread may be accepting one
            self._closed = True

    def cancel_all(self, model: str | None = None) -> None:
        """Answer every queued request, or those to a model, with SchedulerClosedError."""
        what = "the server is shutting down" if model is None else f"model {model} is being unloaded"
        for pending in self._waiting(model):
            self.cancel(pending, SchedulerClosedError(what))

    def _waiting(self, model: str | None = None) -> list[Pending]:
        with self._lock:  # the worker thread takes some
            return self._queues.all_waiting(model)

    @property
    def unanswered(self) -> int:
        """The number of accepted requests without an answer."""
        return self._delivery.unanswered

    async def drained(self) -> None:
        """Wait until every accepted request is answered."""
        await self._delivery.drained()

    @property
    def running(self) -> bool:
        """Whether the worker thread is alive; it may be in a step that outlasted `stop`."""
        return self.worker.thread.is_alive()

    @property
    def thread_id(self) -> int | None:
        """The operating system's number of the worker thread; None before it starts."""
        return self.worker.thread.native_id

    @property
    def is_asleep(self) -> bool:
        """Whether the worker thread sleeps, or is about to: it looks at its sources once more before."""
        return self._work.is_asleep

    @property
    def is_here(self) -> bool:
        """Whether the worker thread asks."""
        return threading.get_ident() == self.worker.thread.ident

    def end(self) -> None:
        """Have the worker thread end this lane's work after its current steps."""
        with self._lock:
            self._closed = self._work.has_ended = True
        self.worker.wakeup.wake()

    def stop(self, timeout: float) -> bool:
        """`end`, and wait; True if the worker thread ended within `timeout` seconds."""
        self.end()
        self.worker.thread.join(timeout)
        return not self.running

    def _check_open(self) -> None:
        if self._closed:
            raise SchedulerClosedError("the server is shutting down")

    @property
    def is_running(self) -> bool:
        """Whether the device has a step of this lane."""
        return self._work.is_running

    def do_chores(self) -> None:
        """Do all of `do_later`, and have what is reported called; on the worker thread."""
        self._stepping.do_chores()
        self._delivery.flush()

    def finish_all(self) -> None:
        """Wait for all steps of this lane that run, and answer their requests; on the worker thread."""
        self._work.finish_all()
