"""The requests of one model that wait for a step, and the composition of its next step."""

import math
from bisect import insort
from collections.abc import Callable
from itertools import takewhile

from expertd.service.engine.callers import FairQueue
from expertd.service.engine.chunks import begin_chunk, begin_rest, chunk_size
from expertd.service.engine.forecast import ArrivalRate, Forecast
from expertd.service.engine.queue_counts import Backlog
from expertd.service.engine.steps import Chunk, Runner, State, Submission


class Queue:
    """A fair queue for each priority and kind of request, long or not.

    used          by priority: seconds of the device, over the weight; see `Queues`
    num_tokens    of requests that wait, or of which a part does
    num_chunks    parts of requests that steps have had
    step_seconds  smoothed over recent steps
    last_seconds  of the last step of each size
    slowest       the longest of them; inf: there was none
    failures      consecutive steps that raised
    is_closed     its model is being unloaded: it takes no more requests
    """

    def __init__(self, runner: Runner, quantum: int, weight: float, clock: Callable[[], float]) -> None:
        self.runner = runner
        self.weight = weight
        self.used: dict[int, float] = {}
        self.num_requests = 0
        self.num_tokens = 0
        self.num_chunks = 0
        self.step_seconds = 0.0
        self.last_seconds: dict[int, float] = {}
        self.slowest = math.inf
        self.forecast = Forecast(clock)
        self._arrivals = ArrivalRate(clock), ArrivalRate(clock)  # of long requests, the second one
        self.failures = 0
        self.is_closed = False
        self._quantum = quantum
        self._fair_queues: dict[int, FairQueue[Submission]] = {}
        self._order: list[int] = []  # the keys of those with requests
        self._chunk_is_due = False  # while requests compete: the last step had none

    def put(self, submission: Submission) -> None:
        """Let a request wait."""
        key = _key(submission)
        fair = self._fair_queues.get(key)
        if fair is None:
            fair = self._fair_queues[key] = FairQueue(self._quantum)
        if not fair.num_requests:
            insort(self._order, key)
        fair.put(submission)
        self.num_requests += 1
        self.num_tokens += submission.request.num_tokens
        self._arrivals[submission.is_long].note(submission.request.num_tokens, submission.arrived)

    def remove(self, submission: Submission) -> None:
        """Forget what is left of a request."""
        key = _key(submission)
        fair = self._fair_queues[key]
        fair.remove(submission)
        if not fair.num_requests:
            self._order.remove(key)
        self.num_requests -= 1
        self.num_tokens -= submission.left

    def all(self) -> list[Submission]:
        """The requests that wait."""
        return [submission for key in self._order for submission in self._fair_queues[key].all()]

    def has(self, caller: int) -> bool:
        """Whether a request of `caller` waits."""
        return any(self._fair_queues[key].has(caller) for key in self._order.copy())

    def tokens_before(self, submission: Submission) -> int:
        """About how many tokens are computed before a new request, but for chunks that take turns with it."""
        queues = (self._fair_queues[key] for key in self._order if key <= _key(submission))
        return sum(queue.tokens_before(submission.caller) for queue in queues)

    def until_end(
        self, submission: Submission, room: int, chunk_tokens: int, joins: bool, wait: float = 0.0
    ) -> float:
        """Seconds, after `wait`, until a new request is likely done; the others as for `take`."""
        before = self.tokens_before(submission)
        num_tokens = before + submission.request.num_tokens
        arriving = self._arrivals[False].per_second
        keys = takewhile(lambda key: not (chunk_tokens and key & 1), self._order)
        behind = max(0, sum(self._fair_queues[key].num_tokens for key in keys) - before)
        if submission.is_long:
            arriving += self._arrivals[True].per_second
        elif chunk_tokens and (_key(submission) | 1) in self._order:
            chunk = min(chunk_tokens, self._fair_queues[_key(submission) | 1].num_tokens)
            if joins:
                num_tokens += math.ceil(num_tokens / (room - min(chunk_tokens, room // 2))) * chunk
            else:
                turns = math.ceil(num_tokens / room) - 1 + self._chunk_is_due
                wait += turns * self.forecast.step(chunk)
        return self.forecast.until_end(num_tokens, room, wait, behind, arriving)

    def backlog(self, step_tokens: int) -> Backlog:
        """What waits for steps of at most `step_tokens`."""
        return Backlog(self.num_requests, self.num_tokens, self.step_seconds, step_tokens)

    @property
    def priority(self) -> int:
        """The priority of the most urgent request; there must be one."""
        return self._order[0] >> 1

    def head(self) -> Submission:
        """The next request; there must be one."""
        return self._fair_queues[self._order[0]].head()

    def take(self, room: int, chunk_tokens: int, joins: bool = False) -> list[Chunk]:
        """What the next step computes, of at most `room` tokens, as much as the largest request.

        chunk_tokens  the most tokens of a chunk; 0: long requests are computed whole, in their turn
        joins         whether a step with a chunk has other requests, too
        """
        if self.num_requests == 1 and not chunk_tokens:  # as most often, when every microsecond counts
            fair = self._fair_queues[self._order.pop()]
            self.num_requests = self.num_tokens = 0
            return begin_rest(fair.take_whole(room, True)[0])
        step: list[Chunk] = []
        others = self._order.copy()
        index = next((index for index, key in enumerate(others) if key & 1), -1) if chunk_tokens else -1
        if index < 0:
            self._fill(others, room, step)
        else:
            others, key = others[:index], others[index]
            equal = [other for other in others if other | 1 == key]
            due = not others or (self._chunk_is_due and others == equal)
            self._chunk_is_due = not due
            if joins:
                kept = min(chunk_tokens, room // 2) if equal else 0  # more urgent ones need not leave room
                left, fits = self._fill(others, room - kept, step)
                due, room = fits or kept > 0, left + kept
            elif not due:
                self._fill(others, room, step)
            if due and room > 0:
                fair = self._fair_queues[key]
                self.num_chunks += 1
                submission = fair.head()
                num_tokens = min(chunk_size(submission.left, chunk_tokens), room)
                fair.take(num_tokens)
                step.append(begin_chunk(submission, num_tokens))
                self.num_tokens -= num_tokens
                self.num_requests -= submission.state is State.STARTED
        self._order = [key for key in self._order if self._fair_queues[key].num_requests]
        return step

    def _fill(self, keys: list[int], room: int, step: list[Chunk]) -> tuple[int, bool]:
        """Add whole requests of these fair queues in their order; the room left, and whether all fit."""
        for key in keys:
            fair = self._fair_queues[key]
            taken, left = fair.take_whole(room, not step)
            step += begin_rest(taken)
            self.num_tokens -= room - left
            self.num_requests -= len(taken)
            room = left
            if fair.num_requests:
                return room, False
        return room, True

    def likely_seconds(self, num_tokens: int) -> float:
        """Seconds of the last step with about as many tokens; 0: there was none."""
        return self.last_seconds.get(num_tokens.bit_length(), 0.0)

    def note(self, num_tokens: int, seconds: float) -> None:
        """Keep what a step took."""
        self.step_seconds = 0.8 * self.step_seconds + 0.2 * seconds if self.step_seconds else seconds
        self.last_seconds[num_tokens.bit_length()] = seconds
        self.slowest = max(self.last_seconds.values())


def _key(submission: Submission) -> int:
    """Fair queues in the order of their keys: by priority, long requests behind the others."""
    return 2 * submission.priority + submission.is_long
