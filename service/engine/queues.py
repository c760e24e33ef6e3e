"""The requests that wait for a step, by model, and what recent steps of each model took.

Requests of a lower priority number come first. Among equal ones, callers and models get equal shares while
they have requests, models in proportion to their weights; a caller's requests are computed in their order. A
more urgent request waits for the steps that run.

A request of more than `prefill_chunk_tokens` is long. While long and other requests compete, long ones are
computed in chunks, in turns with steps of the others, or together with them: then a chunk may be a whole
request, and one is long that does not fit beside the largest. They compete while both kinds are present,
and for some seconds after.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from threading import Lock

from expertd.service.engine.chunks import end_chunk
from expertd.service.engine.errors import EngineError, ModelUnloadedError
from expertd.service.engine.queue import Queue
from expertd.service.engine.queue_counts import Backlog, full_error, may_wait, why_full
from expertd.service.engine.steps import Chunk, Runner, State, Submission, num_tokens_of
from expertd.service.moe.request import OutputMemory
from expertd.service.settings.parts import Limits

_MARGIN = 1.25  # at least, for steps that take longer than recent ones, and for what is between them
_AMPLE = 4.0  # times a pessimistic estimate
_COMPETING_SECONDS = 10.0  # that requests are taken to compete for after they last did


def _unloaded(model: str) -> EngineError:
    return ModelUnloadedError(f"model {model}: expected a loaded one, got it unloaded")


class Queues:
    """All queues. Callers that change them hold `lock`, but for `end`, which takes it.

    why_missing  the error for a model without a queue, ModelUnloadedError or NotReadyError; on any thread
    on_change    called with a model and its backlog when that changes, with `lock` held; None: not called
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.lock = Lock()
        self.limits = limits
        self._max_short_tokens = _max_short_tokens(limits)
        self.why_missing: Callable[[str], EngineError] = _unloaded
        self.on_change: Callable[[str, Backlog], None] | None = None
        self._of: dict[str, Queue] = {}
        self._chunks_before: dict[str, int] = {}  # of models that were unloaded
        self.waiting_models: deque[str] = (
            deque()
        )  # models with waiting requests, the one that waits longest first
        self._used_before: dict[int, float] = {}  # by priority: `used` of its last step's model
        self._long: set[Submission] = set()  # that are not answered
        self.just_ended = False  # the step of a long request, and sources have not been polled since
        self._num_short = 0  # that wait
        self._competing_until = -math.inf

    def set_runners(self, runners: Mapping[str, Runner], weights: Mapping[str, float]) -> None:
        """Have an empty queue for each model."""
        self._of = {name: self._queue(runner, weights.get(name, 1.0)) for name, runner in runners.items()}

    def add_runner(self, model: str, runner: Runner, weight: float) -> None:
        """Have an empty queue for one more model."""
        # A new table: other threads may be reading the old one.
        queue = self._queue(runner, weight)
        queue.num_chunks = self.num_chunks(model)
        self._of = {**self._of, model: queue}

    def _queue(self, runner: Runner, weight: float) -> Queue:
        return Queue(runner, self.limits.max_batch_tokens, weight, self._clock)

    def remove_runner(self, model: str) -> bool:
        """Forget a model without waiting requests; False if there are some."""
        if (queue := self[model]).num_requests:
            return False
        self._chunks_before[model] = queue.num_chunks  # first: metrics are read without the lock
        self._of = {name: queue for name, queue in self._of.items() if name != model}
        return True

    def get(self, model: str) -> Queue | None:
        """The queue of a model; None if it is not loaded."""
        return self._of.get(model)

    def num_chunks(self, model: str) -> int:
        """Parts of a model's requests that steps have had, also before it was unloaded."""
        queue = self._of.get(model)
        return self._chunks_before.get(model, 0) if queue is None else queue.num_chunks

    def __getitem__(self, model: str) -> Queue:
        """The queue of a loaded model. Raises what `why_missing` says."""
        queue = self._of.get(model)
        if queue is None:
            raise self.why_missing(model)
        return queue

    def check_room(self, model: str, num_tokens: int, caller: int) -> Queue:
        """The queue of `model`. Raises as `self[model]` does, and QueueFullError without room for a request.

        A caller without requests in a full queue may have one there: others do not shut it out.
        """
        queue = self[model]
        if queue.is_closed:
            raise ModelUnloadedError(f"model {model}: expected a loaded one, got it unloading")
        if may_wait(self.limits, queue.num_requests + 1, queue.num_tokens + num_tokens):
            return queue
        backlog = queue.backlog(self.limits.max_batch_tokens)  # which no other thread changes
        is_full = not may_wait(self.limits, backlog.num_requests + 1, backlog.num_tokens + num_tokens)
        if is_full and (not caller or queue.has(caller)):
            raise why_full(self.limits, model, backlog, num_tokens)
        return queue

    def add(self, submission: Submission, busy: Callable[[], float] = lambda: 0.0) -> Queue:
        """Put a request in its queue. Raises as `check_room` does, also if it would be answered too late.

        busy  seconds until the steps that run are likely done
        """
        model, num_tokens = submission.model, submission.request.num_tokens
        queue = self.check_room(model, num_tokens, submission.caller)
        submission.is_long = num_tokens > self._max_short_tokens
        # Also if it is refused below: while long requests are computed whole, there is no time for any other.
        if self._num_short if submission.is_long else self.just_ended or self._long:
            self._competing_until = submission.arrived + _COMPETING_SECONDS
        if submission.deadline < math.inf:
            submission.has_ample_time = self._has_ample_time(submission, queue)
            if not submission.has_ample_time:
                self._check_time(submission, busy())
        if submission.is_long:
            self._long.add(submission)
        else:
            self._num_short += 1
        if not queue.num_requests:
            self.waiting_models.append(model)
        queue.put(submission)
        self._changed(model)
        return queue

    def remove(self, submission: Submission) -> bool:
        """Cancel a request, or what is left of it; False if nothing of it waits any more."""
        if submission.state is not State.WAITING:
            return False
        submission.state = State.CANCELLED
        queue = self._of[submission.model]
        queue.remove(submission)
        if not queue.num_requests:
            self.waiting_models.remove(submission.model)
        if not submission.is_long:
            self._num_short -= 1
        elif not submission.running:
            self._long.discard(submission)
        self._changed(submission.model)
        return True

    def end(self, chunk: Chunk, answer: OutputMemory | Exception) -> OutputMemory | Exception | None:
        """What the request is answered with after this step of it; None: not yet."""
        submission = chunk.submission
        if not submission.is_long:
            return answer
        with self.lock:
            if isinstance(answer, Exception):
                self.remove(submission)
            ended = end_chunk(chunk, answer)
            if ended is not None:
                self._long.discard(submission)
                self.just_ended = True
        return ended

    def split_late(self, step: list[Chunk], busy: Callable[[], float]) -> tuple[list[Chunk], list[Chunk]]:
        """A step's parts: those to compute, and those whose outputs would come after their deadlines."""
        if len(step) == 1 and step[0].submission.still_has_ample_time(self._clock()):
            return step, []
        first = min([chunk.submission.deadline for chunk in step])
        if first == math.inf:
            return step, []
        num_tokens = num_tokens_of(step)
        forecast, wait = self._of[step[0].submission.model].forecast, busy()
        end = self._clock() + forecast.margin * (wait + forecast.step(num_tokens))
        if end <= first or (not wait and forecast.is_doubtful(num_tokens)):
            return step, []
        late = [chunk for chunk in step if chunk.submission.deadline < end]
        return [chunk for chunk in step if chunk.submission.deadline >= end], late

    def all_waiting(self, model: str | None = None) -> list[Submission]:
        """The waiting requests of a model; None: of all."""
        queues = [queue for name, queue in self._of.items() if model in (None, name)]
        return [submission for queue in queues for submission in queue.all()]

    def is_alone(self, submission: Submission) -> bool:
        """Whether no other request waits, and this one would be computed in one step."""
        alone = len(self.waiting_models) == 1 and self._of[submission.model].num_requests == 1
        return alone and not (submission.is_long and self._chunk_tokens())

    def large_head(self, num_tokens: int) -> Submission | None:
        """A request of the next step if that likely has at least `num_tokens`, else None.

        None if it takes turns with chunks: it waits for the one before, so that others wait for one chunk.
        """
        if not self.waiting_models:
            return None
        queue, chunk_tokens = self._of[self._next_model()], self._chunk_tokens()
        if chunk_tokens and not self.limits.join_chunks:
            return None
        size = min(queue.num_tokens, chunk_tokens or queue.num_tokens, self.limits.max_batch_tokens)
        return queue.head() if size >= num_tokens else None

    def next_step(self) -> list[Chunk]:
        """Take what the next step computes, all of one model, up to `max_batch_tokens`."""
        model = self._next_model()
        queue = self._of[model]
        priority, before = queue.priority, queue.num_tokens
        chunk_tokens = self._chunk_tokens() if self._long else 0
        step = queue.take(self.limits.max_batch_tokens, chunk_tokens, self.limits.join_chunks)
        self._num_short -= sum([not chunk.submission.is_long for chunk in step]) if self._long else len(step)
        if len(self._of) > 1:
            used = max(queue.used.get(priority, 0.0), self._used_before.get(priority, 0.0))
            self._used_before[priority] = used
            seconds = self._likely_seconds(queue, before - queue.num_tokens)
            queue.used[priority] = used + seconds / queue.weight
        self.waiting_models.remove(model)
        if queue.num_requests:
            self.waiting_models.append(model)
        self._changed(model)
        return step

    def _changed(self, model: str) -> None:
        if self.on_change is not None:
            self.on_change(model, self._of[model].backlog(self.limits.max_batch_tokens))

    def _has_ample_time(self, submission: Submission, queue: Queue) -> bool:
        """Whether its output would come in time also behind all that waits, in slow steps.

        Most deadlines of gRPC calls are far away, and a forecast costs more than the rest of `add`.
        """
        limits, num_tokens, slowest = self.limits, submission.request.num_tokens, queue.slowest
        for model in self.waiting_models:
            waiting = self._of[model]
            num_tokens += waiting.num_tokens
            slowest = max(slowest, waiting.slowest)
        steps = 2 + num_tokens / min(limits.max_batch_tokens, limits.prefill_chunk_tokens or math.inf)
        return _AMPLE * steps * slowest < submission.deadline - submission.arrived

    def _check_time(self, submission: Submission, busy: float) -> None:
        """Refuse a request whose output would come after its deadline, by what recent steps took."""
        limits, model = self.limits, submission.model
        num_tokens = submission.request.num_tokens
        if not busy and not self.waiting_models and self._of[model].forecast.is_doubtful(num_tokens):
            return
        own, chunk_tokens = self._of[model], self._chunk_tokens()
        alone = own.until_end(submission, limits.max_batch_tokens, chunk_tokens, limits.join_chunks)
        for name in self.waiting_models:  # what other models get of the device meanwhile
            other = self._of[name]
            if other is not own and (tokens := other.tokens_before(submission)):
                seconds = other.forecast.until_end(tokens, limits.max_batch_tokens)
                busy += min(seconds, alone * other.weight / own.weight)
        margin = max(_MARGIN, own.forecast.margin)
        given = submission.deadline - submission.arrived
        own_seconds = own.forecast.until_end(num_tokens, limits.max_batch_tokens)
        seconds = margin * own.until_end(
            submission, limits.max_batch_tokens, chunk_tokens, limits.join_chunks, busy
        )
        if seconds <= given:
            return
        retry: float | None = seconds
        why = f"given the queue of model {model} and {margin:.3g} times what recent steps took"
        if own_seconds > given and own.forecast.is_steady:  # another try would be in vain, too
            seconds, retry = own_seconds, None
            why = "what recent steps take for this request alone"
        expected = f"expected about {round(1e6 * seconds)} microseconds"
        raise full_error(limits, f"timeout: {expected}, {why}, got {round(1e6 * given)}", retry)

    def _chunk_tokens(self) -> int:
        """The most tokens of a chunk; 0: steps have whole requests, in their turn."""
        competing = self._long and self._competing_until > self._clock()
        return (self.limits.prefill_chunk_tokens or self.limits.max_request_tokens) if competing else 0

    def _next_model(self) -> str:
        """The model with the most urgent request, of several the one that used the device least."""
        if len(self.waiting_models) == 1:
            return self.waiting_models[0]
        return min(self.waiting_models, key=self._rank)

    def _rank(self, model: str) -> tuple[int, float]:
        queue = self._of[model]
        priority = queue.priority
        # A model that had no requests has no claim to the time before them.
        return priority, max(queue.used.get(priority, 0.0), self._used_before.get(priority, 0.0))

    def _likely_seconds(self, queue: Queue, num_tokens: int) -> float:
        """Of a step; before a model's first one, as long as another model's."""
        known = queue.likely_seconds(num_tokens) or queue.step_seconds
        return known or max(other.step_seconds for other in self._of.values())


def _max_short_tokens(limits: Limits) -> float:
    """The most tokens of a request that is not long."""
    if limits.prefill_chunk_tokens:
        return limits.prefill_chunk_tokens
    room = limits.max_batch_tokens - limits.max_request_tokens
    return room if limits.join_chunks and room > 0 else math.inf
