"""Begins steps on the device, and answers their requests."""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from expertd.service.engine.delivery import Delivery
from expertd.service.engine.errors import DeviceLostError, RequestRefusedError, StepFailedError
from expertd.service.engine.queues import Queues
from expertd.service.engine.steps import Pending, Step, StepObserver
from expertd.service.moe.request import StepResult

logger = logging.getLogger(__name__)

# The callers of a step need a moment for their next requests. If others are waiting already, the next step
# begins up to this part of the last one's time later, so that it has all of them.
_REJOIN_PART = 0.02
_MAX_REJOIN_SECONDS = 100e-6


@dataclass(slots=True)  # not frozen: that takes longer
class Running:
    """A step on the device, with at least one request."""

    requests: list[Pending]
    step: Step
    began: float
    is_direct: bool  # all requests are sources', with memory of their own for the output

    @property
    def model(self) -> str:
        return self.requests[0].model

    @property
    def num_tokens(self) -> int:
        return sum(pending.request.num_tokens for pending in self.requests)


class Stepping:
    """For the thread that uses the device at the time.

    returning     sources' requests of the last step whose callers have not sent another one
    rejoin_until  when the next step no longer waits for them
    chores        what may wait until the next step runs, or until there is none: the next request of a caller
                  that has its answer comes within microseconds
    """

    def __init__(self, queues: Queues, delivery: Delivery, observer: StepObserver) -> None:
        self.running: deque[Running] = deque()
        self.chores: deque[Callable[[], None]] = deque()
        self.returning = 0
        self.rejoin_until = 0.0
        self._queues = queues
        self._delivery = delivery
        self._observer = observer

    def begin(self, requests: list[Pending]) -> None:
        """Begin a step. One that is done at once is finished, too."""
        began = time.perf_counter()
        for pending in requests:
            pending.began = began
        try:
            step = self._queues[requests[0].model].runner.begin([pending.request for pending in requests])
        except Exception as error:
            self._finish_all()  # keep the order of the answers
            self._failed(requests, error)
            return
        direct = all(pending.on_worker and pending.request.output is not None for pending in requests)
        running = Running(requests, step, began, direct)
        if step.is_done() and not self.running:
            self._finish(running)
            return
        self.running.append(running)
        while self.chores:  # while the device computes
            self.chores.popleft()()
        self._delivery.flush()

    def finish_first(self) -> None:
        """Wait for the step that began first, and answer its requests."""
        self._finish(self.running.popleft())

    def run_here(self, pending: Pending) -> None:
        """Run a whole step of one request on the event loop, and answer it."""
        pending.began = began = time.perf_counter()
        try:
            step = self._queues[pending.model].runner.begin([pending.request])
            result = step.finish()
        except Exception as error:
            self._failed([pending], error)
            return
        pending.compute_seconds = result.compute_seconds
        self._queues[pending.model].failures = 0
        self._note(Running([pending], step, began, False), result)
        self._delivery.deliver([(pending, result.outputs[0])])

    def _finish_all(self) -> None:
        while self.running:
            self.finish_first()

    def _finish(self, running: Running) -> None:
        if running.is_direct:
            self._finish_directly(running)
            return
        try:
            result = running.step.finish()
            answers = list(zip(running.requests, result.outputs, strict=True))
        except Exception as error:
            self._failed(running.requests, error)
            return
        took = result.compute_seconds
        direct = [pair for pair in answers if pair[0].on_worker]
        self._expect_callers(len(direct), took)
        for pending, _ in answers:
            pending.compute_seconds = took
        for pending, output in direct:
            pending.done(output)
        self._queues[running.model].failures = 0
        self._note(running, result)
        if direct:
            self._delivery.answered(len(direct))
        self._delivery.deliver_soon([pair for pair in answers if not pair[0].on_worker])

    def _finish_directly(self, running: Running) -> None:
        """Answer sources' requests before anything else: their callers send the next ones at once."""
        try:
            took = running.step.wait()
        except Exception as error:
            self._failed(running.requests, error)
            return
        self._expect_callers(len(running.requests), took)
        for pending in running.requests:
            pending.compute_seconds = took
            output = pending.request.output
            assert output is not None
            pending.done(output)
        self._queues[running.model].failures = 0
        self.chores.append(partial(self._complete, running))

    def _complete(self, running: Running) -> None:
        self._note(running, running.step.finish())
        self._delivery.answered(len(running.requests))

    def _expect_callers(self, count: int, step_seconds: float) -> None:
        self.returning = count
        if count:
            self.rejoin_until = time.perf_counter() + min(_REJOIN_PART * step_seconds, _MAX_REJOIN_SECONDS)

    def _note(self, running: Running, result: StepResult) -> None:
        """Keep what a step took, for the next ones and for metrics."""
        queue = self._queues[running.model]
        queue.note(running.num_tokens, result.compute_seconds)
        waited = [running.began - pending.arrived for pending in running.requests]
        self._delivery.report_later(partial(self._observer.step_done, running.model, result, waited))

    def _failed(self, requests: list[Pending], error: Exception) -> None:
        if isinstance(error, DeviceLostError):
            self._refuse(requests, error)
            return
        model = requests[0].model
        refused = isinstance(error, RequestRefusedError)  # one of them, before the step began
        if not refused:
            self._queues[model].failures += 1
            logger.error("step of model %s with %d requests failed", model, len(requests), exc_info=error)
            self._delivery.report_later(partial(self._observer.step_failed, model, len(requests)))
        self._delivery.flush()
        if len(requests) > 1:
            # One request may have caused it: retry each alone.
            for pending in requests:
                self.begin([pending])
                self._finish_all()
            return
        failure = error
        if not refused:
            failure = StepFailedError(f"the step failed: {type(error).__name__}")
            failure.__cause__ = error
        self._refuse(requests, failure)

    def _refuse(self, requests: list[Pending], error: Exception) -> None:
        """Answer the requests of a step without output."""
        direct = [pending for pending in requests if pending.on_worker]
        for pending in direct:
            pending.done(error)
        if direct:
            self._delivery.answered(len(direct))
        self._delivery.deliver_soon([(pending, error) for pending in requests if not pending.on_worker])
