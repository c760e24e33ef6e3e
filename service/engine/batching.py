"""The queue of each model, and the one thread that turns what waits in them into steps on the device.

Requests that arrive while the device is busy wait, and go together in the model's next step. Within a model
order is first come, first served; between models with work waiting, steps take turns. Everything that must
not overlap a step (loading, another set of SM partitions) runs on the same thread, between steps.
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
    """What computes a step; `expertd.service.moe.runner.LayerRunner` is one."""

    def validate(self, request: LayerRequest) -> None: ...

    def run(self, requests: Sequence[LayerRequest]) -> StepResult: ...


class StepObserver(Protocol):
    """What is told of every step, on the event loop, when its answers have gone out."""

    def step_done(self, model: str, result: StepResult, queue_seconds: Sequence[float]) -> None: ...

    def step_failed(self, model: str, num_requests: int) -> None: ...


class _State(Enum):
    WAITING = auto()
    STARTED = auto()
    GIVEN_UP = auto()


class Pending:
    """One accepted request: `answer` resolves to its output's bytes, or to one of the errors above."""

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
    failures: int = 0  # steps in a row that raised


class Scheduler:
    """Owns the queues and the worker thread. Public methods are for the event loop that called start."""

    def __init__(self, limits: Limits, observer: StepObserver) -> None:
        self._limits = limits
        self._observer = observer
        self._queues: dict[str, _Queue] = {}
        self._turns: deque[str] = deque()  # models with work waiting, next one first
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
        """Serve these models from now on."""
        self._queues = {name: _Queue(runner, deque()) for name, runner in runners.items()}

    def runner(self, model: str) -> Runner:
        """What computes the steps of `model`."""
        return self._queues[model].runner

    async def between_steps(self, job: Callable[[], T]) -> T:
        """Run `job` on the worker thread, before the next step, and return what it returns."""
        done: Future[T] = Future()
        with self._wake:
            self._jobs.append((job, done))
            self._wake.notify()
        return await asyncio.wrap_future(done)

    def check_room(self, model: str, num_tokens: int = 1) -> None:
        """Raise QueueFullError or SchedulerClosedError if a request of `num_tokens` has no room now."""
        if self._closed:
            raise SchedulerClosedError("the server is shutting down")
        queue, limits = self._queues[model], self._limits
        if len(queue.waiting) >= limits.max_queue_requests:
            what = f"{len(queue.waiting)} requests of at most {limits.max_queue_requests}"
        elif queue.num_tokens + num_tokens > limits.max_queue_tokens:
            what = f"{queue.num_tokens} tokens of at most {limits.max_queue_tokens}"
        else:
            return
        steps = math.ceil(queue.num_tokens / limits.max_batch_tokens) + 1
        retry_after = max(1, math.ceil(steps * queue.step_seconds))
        raise QueueFullError(f"the queue of model {model} is full: {what} are waiting", retry_after)

    def submit(self, model: str, request: LayerRequest) -> Pending:
        """Put `request` in the model's queue. Raises as check_room does."""
        assert self._loop is not None
        pending = Pending(model, request, self._loop.create_future())
        queue = self._queues[model]
        with self._wake:
            self.check_room(model, request.num_tokens)
            if not queue.waiting:
                self._turns.append(model)
            queue.waiting.append(pending)
            queue.num_tokens += request.num_tokens
            self._wake.notify()
        self._unanswered += 1
        self._idle.clear()
        return pending

    def give_up(self, pending: Pending, error: Exception) -> bool:
        """Answer a request that has not started with `error`; False if it has started or is answered."""
        with self._wake:
            if pending.state is not _State.WAITING:
                return False
            pending.state = _State.GIVEN_UP
            queue = self._queues[pending.model]
            queue.waiting.remove(pending)
            queue.num_tokens -= pending.request.num_tokens
            if not queue.waiting:
                self._turns.remove(pending.model)
        self._deliver([(pending, error)])
        return True

    def waiting(self, model: str) -> tuple[int, int]:
        """How many requests and tokens of `model` are waiting for a step."""
        queue = self._queues[model]
        return len(queue.waiting), queue.num_tokens

    def failures(self, model: str) -> int:
        """How many steps of `model` have failed since its last good one."""
        return self._queues[model].failures

    def close(self) -> None:
        """Accept nothing more; what was accepted is still answered."""
        self._closed = True

    def give_up_all(self) -> None:
        """Answer every request that has not started with SchedulerClosedError."""
        for queue in self._queues.values():
            for pending in list(queue.waiting):
                self.give_up(pending, SchedulerClosedError("the server is shutting down"))

    async def drained(self) -> None:
        """Return once every accepted request has its answer."""
        await self._idle.wait()

    @property
    def running(self) -> bool:
        """Whether the worker thread is there, be it in a step that outlasted `stop`."""
        return self._thread.is_alive()

    def stop(self, timeout: float) -> bool:
        """End the worker thread after the step it is in; True if it ended within `timeout` seconds."""
        with self._wake:
            self._closed = self._stopped = True
            self._wake.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _deliver(self, answers: Sequence[_Answer], report: Callable[[], None] | None = None) -> None:
        for pending, answer in answers:
            if pending.answer.cancelled():
                pass  # the handler itself was cancelled: nobody is waiting any more
            elif isinstance(answer, Exception):
                pending.answer.set_exception(answer)
            else:
                pending.answer.set_result(answer)
        self._unanswered -= len(answers)
        if not self._unanswered:
            self._idle.set()
        if report is not None:
            # Behind the callers just woken in the loop's queue: no answer waits for its metrics.
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
        """Take the next step's requests off the queue of the model whose turn it is; the lock is held."""
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
            logger.exception("a step of model %s with %d requests failed", model, len(step))
            self._answer([], partial(self._observer.step_failed, model, len(step)))
            if len(step) > 1:
                # One of them may be at fault: alone, each fails or succeeds for itself.
                for pending in step:
                    self._run_step(model, [pending])
                return
            failure = StepFailedError(f"the layer failed: {type(error).__name__}")
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
