"""Begins steps on the device, and answers their requests."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter

from expertd.service.engine.completions import Completion, Completions
from expertd.service.engine.errors import (
    DeviceFailedError,
    DeviceLostError,
    QueueTimeoutError,
    SomeRefusedError,
    StepFailedError,
)
from expertd.service.engine.queue import Queue
from expertd.service.engine.queues import Queues
from expertd.service.engine.steps import Chunk, Step, StepObserver, num_tokens_of
from expertd.service.moe.request import OutputMemory, StepResult

logger = logging.getLogger(__name__)

# The callers of a step need a moment for their next requests. If others are waiting already, the next step
# begins up to this part of the last one's time later, so that it has all of them.
_REJOIN_PART = 0.02
_MAX_REJOIN_SECONDS = 100e-6
_MAX_DEFERRED = 8  # put off while steps follow each other with the device idle in between


@dataclass(slots=True)  # not frozen: that takes longer
class Running:
    """A step on the device, with at least one request or a chunk of one."""

    queue: Queue
    chunks: list[Chunk]
    num_tokens: int
    step: Step
    began: float  # on the device, as far as is known: when it was sent, or the last step was answered
    is_direct: bool  # all requests are sources', with memory of their own for the output
    lasted: float = 0.0  # seconds in which the device was not there for others, once it is answered


class StepRunner:
    """For the thread that uses the device at the time.

    progress      changes when a step begins or ends
    in_step       the chunks of the step that this thread is beginning or ending
    returning     sources' requests of the last step whose callers have not sent another one
    rejoin_until  when the next step no longer waits for them
    failure       says why the device has failed, or None; asked after a failed step
    on_failure    is called with that on the event loop
    answered      when the last step's requests were
    deferred      what may wait until the next step runs, or until there is none: the next request of a caller
                  that has its answer comes within microseconds
    """

    def __init__(
        self,
        queues: Queues,
        completions: Completions,
        observer: StepObserver,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self.running: deque[Running] = deque()
        self.progress = 0
        self.in_step: list[Chunk] | None = None
        self._held_back: list[list[Chunk]] = []
        self._began = 0.0  # when that began
        self.answered = 0.0
        self.deferred: deque[Callable[[], None]] = deque()
        self.failure: Callable[[], str | None] = lambda: None
        self.on_failure: Callable[[str], None] = lambda why: None
        self.returning = 0
        self.rejoin_until = 0.0
        self._queues = queues
        self._completions = completions
        self._observer = observer

    def take(self, chunks: list[Chunk]) -> None:
        """Count `chunks` as in flight from now on: they are in no queue any more."""
        self._began, self.in_step = self._clock(), chunks

    def begin(self, chunks: list[Chunk]) -> None:
        """Begin a step. One that is done at once is finished, too."""
        began = self._clock()
        direct = True
        for chunk in chunks:
            submission = chunk.submission
            if submission.began is None:
                submission.began = began
            direct = direct and submission.on_worker and submission.request.output is not None
        self.progress += 1
        self._began, self.in_step = began, chunks
        try:
            queue = self._queues[chunks[0].submission.model]
            step = queue.runner.begin([chunk.request for chunk in chunks])
        except SomeRefusedError as error:
            for index, refusal in error.refused.items():
                self._refuse([chunks[index]], refusal)
            others = [chunk for index, chunk in enumerate(chunks) if index not in error.refused]
            self.in_step = others or None
            if others:
                self.begin(others)
            return
        except Exception as error:
            with self._held(chunks):
                self._finish_all()  # keep the order of the answers
                self.take(chunks)
            self._failed(chunks, error)
            self.in_step = None
            return
        running = Running(queue, chunks, num_tokens_of(chunks), step, began, direct)
        if step.is_done() and not self.running:
            self._finish(running)
            if len(self.deferred) > _MAX_DEFERRED:
                self.do_deferred()
            return
        self.running.append(running)
        self.in_step = None  # only now: `unfinished` must not miss it
        self.do_deferred()  # while the device computes
        if not self._completions.leaves_reports:
            self._completions.flush()

    def do_deferred(self) -> None:
        """Do all that may wait."""
        while self.deferred:
            self.deferred.popleft()()

    def finish_first(self) -> None:
        """Wait for the step that began first, and answer its requests."""
        first = self.running[0]
        self._began, self.in_step = first.began, first.chunks  # before it leaves `running`
        self.running.popleft()
        self._finish(first)

    def run_here(self, chunk: Chunk) -> None:
        """Run a whole step of one request on the event loop, and answer it.

        What was reported before is called while a device computes the step.
        """
        submission = chunk.submission
        submission.began = began = self._clock()
        self.progress += 1
        self._began, self.in_step = began, [chunk]
        try:
            queue = self._queues[submission.model]
            step = queue.runner.begin([chunk.request])
            if self._completions.leaves_reports:
                self._completions.report_until(step.is_done)
            result = step.finish()
        except SomeRefusedError as error:
            self._refuse([chunk], error.refused[0])
            return
        except Exception as error:
            self._failed([chunk], error)
            return
        finally:
            self.in_step = None
        running = Running(queue, [chunk], chunk.request.num_tokens, step, began, False)
        self._completions.answer(
            self._answers(running, result.outputs, result.compute_seconds, result.num_tokens)
        )
        self._mark_answered(running)
        self._forecast(running)
        self._note(running, result)

    def in_flight(self) -> list[Chunk]:
        """What the first step in flight computes; for any thread, at about this time."""
        running = self.running.copy()
        return self.in_step or (running[0].chunks if running else [])

    def unfinished(self) -> list[Chunk]:
        """What all steps in flight compute, and what waits to be tried again, some twice; as `in_flight`."""
        before = self.in_step or []  # which go to `running` next
        running = [chunk for step in self.running.copy() for chunk in step.chunks]
        held = [chunk for chunks in self._held_back.copy() for chunk in chunks]
        return [*before, *running, *held, *(self.in_step or [])]  # which came from `running`

    def busy_seconds(self) -> float:
        """Until the steps in flight are likely done; for any thread, at about this time."""
        in_step, running = self.in_step, self.running.copy()
        steps = [(self._began, in_step)] if in_step else []
        steps += [(step.began, step.chunks) for step in running if step.chunks is not in_step]
        end = 0.0
        for began, chunks in sorted(steps, key=itemgetter(0)):
            forecast = self._queues[chunks[0].submission.model].forecast
            end = max(end, began) + forecast.step(num_tokens_of(chunks))
        return max(0.0, end - self._clock())

    def first_times(self) -> tuple[float, float]:
        """When the device began the first step in flight, and the seconds it likely takes; 0: unknown."""
        first = self.running[0]
        return first.began, first.queue.likely_seconds(first.num_tokens)

    def refuse_late(self, chunks: Sequence[Chunk]) -> None:
        """Answer requests whose outputs would come too late."""
        for chunk in chunks:
            given = round(1e6 * (chunk.submission.deadline - chunk.submission.arrived))
            text = f"the request's timeout of {given} microseconds expires before its step would end"
            self._refuse([chunk], QueueTimeoutError(text))

    @contextmanager
    def _held(self, chunks: list[Chunk]) -> Iterator[None]:
        """Keep the chunks of a failed step in sight, which no step has at present."""
        self._held_back.append(chunks)
        try:
            yield
        finally:
            self._held_back.pop()

    def _finish_all(self) -> None:
        while self.running:
            self.finish_first()

    def _finish(self, running: Running) -> None:
        self._began, self.in_step = running.began, running.chunks
        try:
            if running.is_direct:
                self._finish_directly(running)
            else:
                self._finish_and_copy(running)
        finally:
            self.in_step = None
            self.progress += 1

    def _finish_and_copy(self, running: Running) -> None:
        try:
            running.step.wait()
            result = running.step.finish()
            seconds, num_tokens = result.compute_seconds, result.num_tokens
            answers = self._answers(running, result.outputs, seconds, num_tokens)
        except Exception as error:
            self._failed(running.chunks, error)
            return
        direct = [pair for pair in answers if pair[0].on_worker]
        self._expect_callers(len(direct), result.compute_seconds)
        self._leave_step()
        for submission, answer in direct:
            submission.done(answer)
        self._mark_answered(running)
        self._forecast(running)
        self._note(running, result)
        if direct:
            self._completions.answered(len(direct))
        self._completions.deliver_soon([pair for pair in answers if not pair[0].on_worker])

    def _finish_directly(self, running: Running) -> None:
        """Answer sources' requests before anything else: their callers send the next ones at once."""
        try:
            took = running.step.wait()
        except Exception as error:
            self._failed(running.chunks, error)
            return
        outputs = [output for chunk in running.chunks if (output := chunk.request.output) is not None]
        answers = self._answers(running, outputs, took)
        self._expect_callers(len(answers), took)
        self._leave_step()
        for submission, answer in answers:
            submission.done(answer)
        self._mark_answered(running)
        self.deferred.append(partial(self._complete, running, len(answers)))

    def _leave_step(self) -> None:
        """The requests of the step are being answered: from now on, `give_up` no longer answers them."""
        with self._queues.lock:
            self.in_step = None

    def _complete(self, running: Running, num_answers: int) -> None:
        self._forecast(running)
        self._note(running, running.step.finish())
        self._completions.answered(num_answers)

    def _answers(
        self, running: Running, outputs: Sequence[OutputMemory], step_seconds: float, num_tokens: int = 0
    ) -> list[Completion]:
        """The requests that a step which succeeded leaves with nothing to compute, and their answers.

        num_tokens  of the step; 0: not known yet
        """
        pairs = list(zip(running.chunks, outputs, strict=True))
        running.queue.failures = 0
        answers: list[Completion] = []
        for chunk, output in pairs:
            submission = chunk.submission
            if not chunk.start:
                submission.began = running.began
            submission.compute_seconds += step_seconds
            submission.step_tokens = num_tokens
            answer = self._queues.end(chunk, output) if submission.is_long else output
            if answer is not None:
                answers.append((submission, answer))
        return answers

    def _expect_callers(self, count: int, step_seconds: float) -> None:
        self.returning = count
        if count:
            self.rejoin_until = self._clock() + min(_REJOIN_PART * step_seconds, _MAX_REJOIN_SECONDS)

    def _mark_answered(self, running: Running) -> None:
        """Keep when a step was answered: until then, the device was not there for later ones."""
        self.answered = self._clock()
        running.lasted = self.answered - running.began
        for later in self.running:
            later.began = self.answered

    def _forecast(self, running: Running) -> None:
        """Let a step that was answered count for what later ones are expected to take."""
        running.queue.forecast.note(running.num_tokens, running.lasted)

    def _note(self, running: Running, result: StepResult) -> None:
        """Keep what a step took, for the next ones and for metrics."""
        model = running.chunks[0].submission.model
        running.queue.note(running.num_tokens, result.compute_seconds)
        # A request in chunks counts in its first step.
        waited = [running.began - chunk.submission.arrived for chunk in running.chunks if not chunk.start]
        self._completions.report_later(partial(self._observer.step_done, model, result, waited))

    def _failed(self, chunks: list[Chunk], error: Exception) -> None:
        if (why := self.failure()) is not None:
            error = DeviceFailedError(f"the device has failed: {why}")
            self._completions.loop.call_soon_threadsafe(self.on_failure, str(error))
        if isinstance(error, DeviceLostError):
            self._refuse(chunks, error)
            return
        model = chunks[0].submission.model
        self._queues[model].failures += 1
        logger.error("step of model %s with %d requests failed", model, len(chunks), exc_info=error)
        self._completions.report_later(partial(self._observer.step_failed, model, len(chunks)))
        self._completions.flush()
        if len(chunks) > 1:
            # One request may have caused it: retry each alone.
            for index, chunk in enumerate(chunks, 1):
                with self._held(chunks[index:]):
                    self.begin([chunk])
                    self._finish_all()
            return
        failure = StepFailedError(f"the step failed: {type(error).__name__}")
        failure.__cause__ = error
        self._refuse(chunks, failure)

    def _refuse(self, chunks: list[Chunk], error: Exception) -> None:
        """Answer the requests of a step without output."""
        answers: list[Completion] = []
        for chunk in chunks:
            answer = self._queues.end(chunk, error)
            if answer is not None:
                answers.append((chunk.submission, answer))
        direct = [pair for pair in answers if pair[0].on_worker]
        with self._queues.lock:  # `give_up` may answer them, too
            calls = [(submission.take_done(), refusal) for submission, refusal in direct]
        for done, refusal in calls:
            done(refusal)
        if direct:
            self._completions.answered(len(direct))
        self._completions.deliver_soon([pair for pair in answers if not pair[0].on_worker])
