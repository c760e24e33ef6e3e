"""A queue per model, and one worker thread that runs the queued requests on the device in steps.

Requests that arrive while the device is busy are batched into the model's next step, first come, first
served. Steps of models with queued requests alternate (round robin). Work that must not overlap a step
(loading, replacing SM partitions) runs on the same thread, between steps.
"""

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, Protocol, TypeVar

from expertd.service.engine.errors import QueueFullError, SchedulerClosedError, StepFailedError
from expertd.service.moe.request import LayerRequest, StepResult
from expertd.service.settings.model import Limits

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes steps; implemented by `expertd.service.moe.runner.LayerRunner`."""

    def validate(self, request: LayerRequest) -> None: ...

    def run(self, requests: Sequence[LayerRequest]) -> StepResult: ...


class StepObserver(Protocol):
    """Notified of every step, on the event loop, after its answers are delivered."""

    def step_done(self, model: str, result: StepResult, queue_seconds: Sequence[float]) -> None: ...

    def step_failed(self, model: str, num_requests: int) -> None: ...


class _State(Enum):
    WAITING = auto()
    STARTED = auto()
    CANCELLED = auto()


class Pending:
    """An accepted request; `answer` resolves to the bytes of its output, or to an EngineError."""

    __slots__ = ("answer", "arrived", "model", "request", "state")

    def __init__(
        self, model: str, request: LayerRequest, answer: "asyncio.Future[memoryview | bytes]"
    ) -> None:
        self.model = model
        self.request = request
        self.answer = answer
        self.arrived = time.perf_counter()
        self.state = _State.WAITING


_Answer = tuple[Pending, memoryview | bytes | Exception]


@dataclass(slots=True)
class _Queue:
    runner: Runner
    waiting: deque[Pending]
    num_tokens: int = 0
    step_seconds: float = 0.0  # smoothed over recent steps
    failures: int = 0  # consecutive steps that raised


class Scheduler:
    """Owns the queues and the worker thread. Call its methods from the event loop that called `start`."""

    def __init__(self, limits: Limits, observer: StepObserver) -> None:
        self._limits = limits
        self._observer = observer
        self._queues: dict[str, _Queue] = {}
        self._turns: deque[str] = deque()  # models with queued requests, next one first
        self._jobs: deque[tuple[Callable[[], object], Future[Any]]] = deque()
        self._wake = threading.Condition(threading.Lock())
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
        with self._wake:
            self._jobs.append((job, done))
            self._wake.notify()
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

    def submit(self, model: str, request: LayerRequest) -> Pending:
        """Put `request` in the model's queue. Raises as `check_capacity` does."""
        assert self._loop is not None
        pending = Pending(model, request, self._loop.create_future())
        queue = self._queues[model]
        with self._wake:
            self.check_capacity(model, request.num_tokens)
            if not queue.waiting:
                self._turns.append(model)
            queue.waiting.append(pending)
            queue.num_tokens += request.num_tokens
            self._wake.notify()
        self._unanswered += 1
        self._idle.clear()
        return pending

    def cancel(self, pending: Pending, error: Exception) -> bool:
        """Answer a queued request with `error`; False if its step has begun or it is already answered."""
        with self._wake:
            if pending.state is not _State.WAITING:
                return False
            pending.state = _State.CANCELLED
            queue = self._queues[pending.model]
            queue.waiting.remove(pending)
            queue.num_tokens -= pending.request.num_tokens
            if not queue.waiting:
                self._turns.remove(pending.model)
        self._deliver([(pending, error)])
        return True

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
        await self._idle.wait()

    @property
    def running(self) -> bool:
        """Whether the worker thread is alive; it may be in a step that outlasted `stop`."""
        return self._thread.is_alive()

    def stop(self, timeout: float) -> bool:
        """Stop the worker thread after its current step; True if it ended within `timeout` seconds."""
        with self._wake:
            self._closed = self._stopped = True
            self._wake.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _deliver(self, answers: Sequence[_Answer], report: Callable[[], None] | None = None) -> None:
        for pending, answer in answers:
            if pending.answer.cancelled():
                pass  # the handler was cancelled: nobody is waiting
            elif isinstance(answer, Exception):
                pending.answer.set_exception(answer)
            else:
                pending.answer.set_result(answer)
        self._unanswered -= len(answers)
        if not self._unanswered:
            self._idle.set()
        if report is not None:
            # Runs after the handlers just woken, so that no response waits for metrics.
            asyncio.get_running_loop().call_soon(report)

    def _work(self) -> None:
        while True:
            with self._wake:
                while not (self._stopped or self._jobs or self._turns):
                    self._wake.wait()
                if self._stopped:
                    break
                job = self._jobs.popleft() if self._jobs else None
                model, step = ("", []) if job else self._next_step()
            if job:
                self._run_job(*job)
            else:
                self._run_step(model, step)
        for _, done in self._jobs:
            done.cancel()

    def _next_step(self) -> tuple[str, list[Pending]]:
        """Dequeue the requests of the next step. The caller holds the lock."""
        model = self._turns.popleft()
        queue = self._queues[model]
        step: list[Pending] = []
        room = self._limits.max_batch_tokens
        while queue.waiting and (queue.waiting[0].request.num_tokens <= room or not step):
            pending = queue.waiting.popleft()
            pending.state = _State.STARTED
            room -= pending.request.num_tokens
            step.append(pending)
        queue.num_tokens -= self._limits.max_batch_tokens - room
        if queue.waiting:
            self._turns.append(model)
        return model, step

    def _run_step(self, model: str, step: list[Pending]) -> None:
        queue = self._queues[model]
        started = time.perf_counter()
        try:
            result = queue.runner.run([pending.request for pending in step])
            outputs = list(zip(step, result.outputs, strict=True))
        except Exception as error:
            queue.failures += 1
            logger.exception("step of model %s with %d requests failed", model, len(step))
            self._answer([], partial(self._observer.step_failed, model, len(step)))
            if len(step) > 1:
                # One request may have caused it: retry each alone.
                for pending in step:
                    self._run_step(model, [pending])
                return
            failure = StepFailedError(f"the step failed: {type(error).__name__}")
            failure.__cause__ = error
            self._answer([(step[0], failure)])
            return
        queue.failures = 0
        took = time.perf_counter() - started
        queue.step_seconds = took if not queue.step_seconds else 0.8 * queue.step_seconds + 0.2 * took
        waited = [started - pending.arrived for pending in step]
        self._answer(outputs, partial(self._observer.step_done, model, result, waited))

    def _answer(self, answers: Sequence[_Answer], report: Callable[[], None] | None = None) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._deliver, answers, report)

    def _run_job(self, job: Callable[[], object], done: Future[Any]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(job())
        except BaseException as error:
            done.set_exception(error)
