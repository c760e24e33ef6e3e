"""A queue per model, and one worker thread that runs the queued requests on the device in steps.

Requests that arrive while the device is busy are batched into the model's next step, first come, first
served. A large step begins while another one runs, so that its bytes travel meanwhile; small ones wait,
because more requests may join them. Steps of models with queued requests alternate (round robin). Work that
must not overlap a step (loading, replacing SM partitions) runs on the same thread, between steps.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from expertd.service.engine.errors import QueueFullError, SchedulerClosedError, StepFailedError
from expertd.service.engine.steps import Done, Pending, Runner, State, Step, StepObserver
from expertd.service.engine.wakeup import Source, Wakeup
from expertd.service.moe.request import LayerRequest, Output, StepResult
from expertd.service.settings.model import Limits

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Steps of this many tokens begin before the preceding one is done: they take longer to copy than to prepare.
_EARLY_TOKENS = 512
# A step that likely takes no longer may run on the event loop: handing it over and back takes 0.1 to 0.3 ms.
_SHORT_SECONDS = 5e-3
# After such a step the event loop stays awake for as long, if the caller has been this quick before.
_AWAKE_SECONDS = 0.2e-3
_MAX_RUNNING = 2  # steps: one whose bytes are copied, and one that computes
# The callers of a step need a moment for their next requests. If others are waiting already, the next step
# begins up to this part of the last one's time later, so that it has all of them.
_REJOIN_PART = 0.02
_MAX_REJOIN_SECONDS = 100e-6
_MAX_REPORTS = 64  # of steps and answers, that wait for a moment in which they delay nothing
_POLLED_PART = 0.9  # of a large step's likely time; for the rest, waiting for its end alone ends sooner
_POLL_SECONDS = 100e-6  # how often a running step is checked for its end while others may begin


_Answer = tuple[Pending, Output | Exception]


@dataclass(slots=True)
class _Queue:
    runner: Runner
    waiting: deque[Pending]
    num_tokens: int = 0
    step_seconds: float = 0.0  # smoothed over recent steps
    failures: int = 0  # consecutive steps that raised
    last_seconds: dict[int, float] = field(default_factory=dict)  # of the last step, by `_size`


@dataclass(slots=True)  # not frozen: that takes longer
class _Running:
    model: str
    requests: list[Pending]
    step: Step
    began: float
    is_direct: bool  # all requests are sources', with memory of their own for the output

    @property
    def num_tokens(self) -> int:
        return sum(pending.request.num_tokens for pending in self.requests)


def _size(num_tokens: int) -> int:
    """Steps of the same size take a similar time."""
    return num_tokens.bit_length()


class Scheduler:
    """Owns the queues and the worker thread. `submit` and `cancel` are safe from any thread."""

    def __init__(self, limits: Limits, observer: StepObserver, spin_seconds: float = 0.0) -> None:
        self._limits = limits
        self._observer = observer
        self._queues: dict[str, _Queue] = {}
        self._turns: deque[str] = deque()  # models with queued requests, next one first
        self._jobs: deque[tuple[Callable[[], object], Future[Any]]] = deque()
        self._running: deque[_Running] = deque()  # used by the worker thread alone
        self._reports: deque[Callable[[], None]] = deque()  # to call on the event loop
        self._chores: deque[Callable[[], None]] = deque()  # of the worker thread, when nothing else is to do
        self._spin_seconds = spin_seconds  # before sleeping, if there are sources
        self._wakeup = Wakeup()
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # of the thread that uses the device
        self._sleeping = False
        self._ended_here = -math.inf  # when the last step on the event loop was answered
        self._stays_awake = False  # after the next one
        self._returning = 0  # sources' requests of the last step whose callers have not sent another one
        self._rejoin_until = 0.0
        self._closed = False
        self._stopped = False
        self._unanswered = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._work, name="expertd-worker", daemon=True)

    def start(self) -> None:
        """Start the worker thread; answers are delivered to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def set_runners(self, runners: Mapping[str, Runner]) -> None:
        """Set the runner of each model."""
        self._queues = {name: _Queue(runner, deque()) for name, runner in runners.items()}

    def runner(self, model: str) -> Runner:
        """The runner of `model`."""
        return self._queues[model].runner

    async def between_steps(self, job: Callable[[], T]) -> T:
        """Run `job` on the worker thread before the next step, and return its result."""
        done: Future[T] = Future()
        with self._lock:
            self._jobs.append((job, done))
            self._sleeping = False
        self._wakeup.wake()
        return await asyncio.wrap_future(done)

    def check_capacity(self, model: str, num_tokens: int = 1) -> None:
        """Raise QueueFullError or SchedulerClosedError if a request of `num_tokens` would be refused now."""
        if self._closed:
            raise SchedulerClosedError("the server is shutting down")
        queue, limits = self._queues[model], self._limits
        if len(queue.waiting) >= limits.max_queue_requests:
            waiting = f"{len(queue.waiting)} requests of at most {limits.max_queue_requests}"
        elif queue.num_tokens + num_tokens > limits.max_queue_tokens:
            waiting = f"{queue.num_tokens} tokens of at most {limits.max_queue_tokens}"
        else:
            return
        steps = math.ceil(queue.num_tokens / limits.max_batch_tokens) + 1
        retry_after = max(1, math.ceil(steps * queue.step_seconds))
        raise QueueFullError(f"the queue of model {model} is full: {waiting} are waiting", retry_after)

    def submit(
        self, model: str, request: LayerRequest, done: Done, on_worker: bool = False, alone: bool = False
    ) -> Pending:
        """Put `request` in the model's queue. Raises as `check_capacity` does.

        `done` is called on the event loop, or directly on the worker thread: then it must return soon,
        because the next step waits for it. It must not raise.

        alone  the event loop has no other requests at present: if nothing else runs and the step is likely to
               be short, it runs there, after all that has arrived there
        """
        pending = Pending(model, request, done, on_worker)
        queue = self._queues[model]
        with self._lock:
            self.check_capacity(model, request.num_tokens)
            if not queue.waiting:
                self._turns.append(model)
            queue.waiting.append(pending)
            queue.num_tokens += request.num_tokens
            self._unanswered += 1
            if on_worker and self._returning:
                self._returning -= 1
            if alone and self._sleeping and self._is_short(queue):
                assert self._loop is not None
                self._stays_awake = pending.arrived - self._ended_here < _AWAKE_SECONDS
                self._loop.call_soon(self._run_here, pending)
                return pending
            asleep, self._sleeping = self._sleeping, False
        if asleep:
            self._wakeup.wake()
        return pending

    def cancel(self, pending: Pending, error: Exception) -> bool:
        """Answer a queued request with `error`; False if its step has begun or it is already answered."""
        with self._lock:
            if pending.state is not State.WAITING:
                return False
            pending.state = State.CANCELLED
            queue = self._queues[pending.model]
            queue.waiting.remove(pending)
            queue.num_tokens -= pending.request.num_tokens
            if not queue.waiting:
                self._turns.remove(pending.model)
        pending.done(error)
        self._answered(1)
        return True

    def add_source(self, source: Source) -> None:
        """Have the worker thread poll `source`, from now on."""
        self._wakeup.add(source)

    def remove_source(self, source: Source) -> None:
        """Poll `source` no more, once a poll that has begun is over."""
        self._wakeup.remove(source)

    def poll_sources(self) -> None:
        """Poll every source once, so that what has arrived is accepted, even during a step."""
        for source in self._wakeup.all():
            source.poll()

    def do_later(self, chore: Callable[[], None]) -> None:
        """Call `chore` on the worker thread, once the next step runs or if there is none; for that thread.

        The next request of a caller that has its answer comes within microseconds: chores delay it least.
        """
        self._chores.append(chore)

    def report_later(self, report: Callable[[], None]) -> None:
        """Call `report` on the event loop soon, where it delays no step; for the worker thread."""
        self._reports.append(report)
        if len(self._reports) % _MAX_REPORTS == 0:
            self._flush_reports()

    def waiting(self, model: str) -> tuple[int, int]:
        """The numbers of queued requests and tokens of `model`."""
        queue = self._queues[model]
        return len(queue.waiting), queue.num_tokens

    def failures(self, model: str) -> int:
        """The number of consecutive failed steps of `model`, up to now."""
        return self._queues[model].failures

    def close(self) -> None:
        """Refuse new requests; accepted ones are still answered."""
        self._closed = True

    def cancel_all(self) -> None:
        """Answer every queued request with SchedulerClosedError."""
        for queue in self._queues.values():
            for pending in list(queue.waiting):
                self.cancel(pending, SchedulerClosedError("the server is shutting down"))

    async def drained(self) -> None:
        """Wait until every accepted request is answered."""
        self._idle.clear()
        while self._unanswered:
            await self._idle.wait()

    @property
    def running(self) -> bool:
        """Whether the worker thread is alive; it may be in a step that outlasted `stop`."""
        return self._thread.is_alive()

    def stop(self, timeout: float) -> bool:
        """Stop the worker thread after its current steps; True if it ended within `timeout` seconds."""
        with self._lock:
            self._closed = self._stopped = True
        self._wakeup.wake()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            job: tuple[Callable[[], object], Future[Any]] | None = None
            model = ""
            requests: list[Pending] = []
            if self._wakeup.sources:
                self._poll(0)
                if self._turns and not self._running:
                    self._wait_for_callers()
            with self._lock:
                if self._stopped and not self._running and not self._chores:
                    break
                if not self._running:
                    job = self._jobs.popleft() if self._jobs else None
                if job is None and self._may_begin():
                    model, requests = self._next_step()
                self._sleeping = not (job or requests or self._running or self._chores)
            if not (job or requests or self._chores or self._running):
                self._wait()
                continue
            with self._turn:
                if job:
                    self._run_job(*job)
                elif requests:
                    self._begin(model, requests)
                elif self._chores:
                    self._chores.popleft()()
                elif not self._wait_for_more():
                    self._finish(self._running.popleft())
        self._wakeup.close()
        for _, done in self._jobs:
            done.cancel()

    @staticmethod
    def _is_short(queue: _Queue) -> bool:
        """Whether a step of all that is queued is likely to be short."""
        return 0.0 < queue.last_seconds.get(_size(queue.num_tokens), 0.0) <= _SHORT_SECONDS

    def _run_here(self, pending: Pending) -> None:
        """Run a request's step on the event loop, unless the worker thread is awake or more has arrived."""
        with self._lock:
            if pending.state is not State.WAITING:
                return
            asleep = self._sleeping
            alone = asleep and list(self._turns) == [pending.model] and not self._jobs
            alone = alone and len(self._queues[pending.model].waiting) == 1
            # Never held for long: a worker that wakes up now waits for this step.
            alone = alone and self._turn.acquire(blocking=False)
            if alone:
                self._next_step()
            else:
                self._sleeping = False
        if not alone:
            if asleep:
                self._wakeup.wake()
            return
        try:
            self._begin_and_finish(pending)
        finally:
            self._turn.release()

    def _begin_and_finish(self, pending: Pending) -> None:
        pending.began = began = time.perf_counter()
        try:
            step = self._queues[pending.model].runner.begin([pending.request])
            result = step.finish()
        except Exception as error:
            self._failed(pending.model, [pending], error)
            return
        self._queues[pending.model].failures = 0
        pending.compute_seconds = result.compute_seconds
        self._note(_Running(pending.model, [pending], step, began, False), result)
        self._deliver([(pending, result.outputs[0])])
        self._ended_here = time.perf_counter()
        if self._stays_awake:
            self._stay_awake()

    def _stay_awake(self) -> None:
        """Keep the event loop from sleeping for a moment: waking it would take about 0.05 ms."""
        if self._sleeping and not self._turns and time.perf_counter() - self._ended_here < _AWAKE_SECONDS:
            assert self._loop is not None
            self._loop.call_soon(self._stay_awake)

    def _wait(self) -> None:
        """Wait for a wake-up or a source: if there are sources, awake for a short time, then asleep."""
        if self._wakeup.sources:
            end = time.perf_counter() + self._spin_seconds
            while time.perf_counter() < end:
                if self._poll(0):
                    return
        if self._reports:
            self._flush_reports()
        self._poll(None)

    def _poll(self, seconds: float | None) -> bool:
        """Wait up to `seconds`, and poll the sources that rang; False if nothing happened."""
        rang = self._wakeup.wait(seconds)
        if rang is None:
            return False
        self._sleeping = False
        for source in rang:
            source.poll()
        return True

    def _wait_for_callers(self) -> None:
        """Poll sources until the callers of the last step are back, for a short time."""
        while self._returning and time.perf_counter() < self._rejoin_until:
            self._poll(0)
            if self._chores:
                self._chores.popleft()()
        self._returning = 0

    def _may_begin(self) -> bool:
        """Whether the next step may begin now. The caller holds the lock."""
        if not self._running:
            return bool(self._turns)
        if self._stopped or self._jobs or not self._turns or len(self._running) == _MAX_RUNNING:
            return False
        return self._queues[self._turns[0]].num_tokens >= _EARLY_TOKENS

    def _wait_for_more(self) -> bool:
        """Wait until the only running step is done; True as soon as the next one may begin."""
        running = self._running
        if len(running) == _MAX_RUNNING or running[0].num_tokens < _EARLY_TOKENS:
            return False  # a small step is over before another is worth beginning
        seconds = self._queues[running[0].model].last_seconds.get(_size(running[0].num_tokens), 0.0)
        until = running[0].began + _POLLED_PART * seconds
        while time.perf_counter() < until and not running[0].step.is_done():
            if self._wakeup.sources:
                self._poll(0)
            with self._lock:
                if self._may_begin():
                    return True
            time.sleep(_POLL_SECONDS)
        return False

    def _next_step(self) -> tuple[str, list[Pending]]:
        """Dequeue the requests of the next step. The caller holds the lock."""
        model = self._turns.popleft()
        queue = self._queues[model]
        step: list[Pending] = []
        room = self._limits.max_batch_tokens
        while queue.waiting and (queue.waiting[0].request.num_tokens <= room or not step):
            pending = queue.waiting.popleft()
            pending.state = State.STARTED
            room -= pending.request.num_tokens
            step.append(pending)
        queue.num_tokens -= self._limits.max_batch_tokens - room
        if queue.waiting:
            self._turns.append(model)
        return model, step

    def _begin(self, model: str, requests: list[Pending]) -> None:
        began = time.perf_counter()
        for pending in requests:
            pending.began = began
        try:
            step = self._queues[model].runner.begin([pending.request for pending in requests])
        except Exception as error:
            while self._running:  # keep the order of the answers
                self._finish(self._running.popleft())
            self._failed(model, requests, error)
            return
        direct = all(pending.on_worker and pending.request.output is not None for pending in requests)
        running = _Running(model, requests, step, began, direct)
        if step.is_done() and not self._running:
            self._finish(running)
        else:
            self._running.append(running)
            while self._chores:  # while the device computes
                self._chores.popleft()()
            self._flush_reports()

    def _finish(self, running: _Running) -> None:
        if running.is_direct:
            self._finish_directly(running)
            return
        model, requests = running.model, running.requests
        try:
            result = running.step.finish()
            answers = list(zip(requests, result.outputs, strict=True))
        except Exception as error:
            self._failed(model, requests, error)
            return
        took = result.compute_seconds
        direct = [pair for pair in answers if pair[0].on_worker]
        self._expect_callers(len(direct), took)
        for pending, _ in answers:
            pending.compute_seconds = took
        for pending, output in direct:
            pending.done(output)
        self._queues[model].failures = 0
        self._note(running, result)
        if direct:
            self._answered(len(direct))
        self._deliver_soon([pair for pair in answers if not pair[0].on_worker])

    def _finish_directly(self, running: _Running) -> None:
        """Answer sources' requests before anything else: their callers send the next ones at once."""
        try:
            took = running.step.wait()
        except Exception as error:
            self._failed(running.model, running.requests, error)
            return
        self._expect_callers(len(running.requests), took)
        for pending in running.requests:
            pending.compute_seconds = took
            output = pending.request.output
            assert output is not None
            pending.done(output)
        self._queues[running.model].failures = 0

        def note() -> None:
            self._note(running, running.step.finish())
            self._answered(len(running.requests))

        self._chores.append(note)

    def _expect_callers(self, count: int, step_seconds: float) -> None:
        self._returning = count
        if count:
            self._rejoin_until = time.perf_counter() + min(_REJOIN_PART * step_seconds, _MAX_REJOIN_SECONDS)

    def _note(self, running: _Running, result: StepResult) -> None:
        """Keep what a step took, for the next ones and for metrics."""
        queue, took = self._queues[running.model], result.compute_seconds
        queue.step_seconds = took if not queue.step_seconds else 0.8 * queue.step_seconds + 0.2 * took
        queue.last_seconds[_size(running.num_tokens)] = took
        waited = [running.began - pending.arrived for pending in running.requests]
        self.report_later(partial(self._observer.step_done, running.model, result, waited))

    def _failed(self, model: str, requests: list[Pending], error: Exception) -> None:
        self._queues[model].failures += 1
        logger.error("step of model %s with %d requests failed", model, len(requests), exc_info=error)
        self.report_later(partial(self._observer.step_failed, model, len(requests)))
        self._flush_reports()
        if len(requests) > 1:
            # One request may have caused it: retry each alone.
            for pending in requests:
                self._begin(model, [pending])
                while self._running:
                    self._finish(self._running.popleft())
            return
        failure = StepFailedError(f"the step failed: {type(error).__name__}")
        failure.__cause__ = error
        if requests[0].on_worker:
            requests[0].done(failure)
            self._answered(1)
        else:
            self._deliver_soon([(requests[0], failure)])

    def _deliver_soon(self, answers: Sequence[_Answer]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, answers)

    def _flush_reports(self) -> None:
        if self._reports:
            self._deliver_soon([])

    def _deliver(self, answers: Sequence[_Answer]) -> None:
        for pending, answer in answers:
            pending.done(answer)
        if answers:
            self._answered(len(answers))
        # These run after the handlers just woken, so that no response waits for metrics.
        while self._reports:
            asyncio.get_running_loop().call_soon(self._reports.popleft())

    def _answered(self, count: int) -> None:
        with self._lock:
            self._unanswered -= count
        if not self._unanswered and not self._idle.is_set() and self._loop is not None:
            self._loop.call_soon_threadsafe(self._idle.set)

    def _run_job(self, job: Callable[[], object], done: Future[Any]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(job())
        except BaseException as error:
            done.set_exception(error)
