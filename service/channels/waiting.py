"""Requests of an HTTP process that wait for room in its channel, in the engine's order."""

from collections import Counter
from contextlib import suppress
from typing import Generic, NamedTuple, Protocol, TypeVar

from expertd.service.engine.callers import FairQueue, Waiting
from expertd.service.engine.errors import QueueFullError
from expertd.service.engine.queue_counts import QueueCounts, may_wait, num_cells, why_full
from expertd.service.settings.model import Settings


class QueueKey(NamedTuple):
    """What the requests of one fair queue have in common; is_long: more tokens than one chunk, or for
    the prefill lane.
    """

    priority: int
    model: str
    is_long: bool


class Call(Waiting, Protocol):
    """A request of `left` tokens."""

    @property
    def kind(self) -> QueueKey: ...


T = TypeVar("T", bound=Call)


class WaitingCalls(Generic[T]):
    """A fair queue for each priority, model, and kind of request, long or not.

    The most urgent requests leave first. Of equal ones, models get tokens in proportion to their weights, and
    a model's long requests as many as its others; then callers take turns.

    Of each model, as much may wait as the queue limits of `settings` allow, with lanes, on each lane; what
    waits in other processes, and in the engine's queue, counts.

    counts      of all processes; None: of this one alone
    in_channel  the numbers of requests in the channel, by kind and caller
    """

    def __init__(self, settings: Settings, counts: QueueCounts | None = None) -> None:
        self._limits = settings.limits
        self._has_lanes = settings.lanes.are_on
        self._weights = {model.name: model.weight for model in settings.models}
        short = settings.lanes.decode_max_tokens or settings.limits.prefill_chunk_tokens
        self._short_tokens = short or settings.limits.max_request_tokens
        self._queues: dict[QueueKey, FairQueue[T]] = {}
        self._used: dict[QueueKey, float] = {}  # tokens that have left, over the weight
        self._clock: dict[int, float] = {}  # by priority: `_used` of the kind that left last, before it
        self._ready: dict[QueueKey, None] = {}  # with requests, those that have had some for longest first
        self._numbers = {model.name: number for number, model in enumerate(settings.models)}
        num_models = len(settings.models)
        self._counts = QueueCounts([0.0] * num_cells(num_models), num_models, 0) if counts is None else counts
        self._num_requests = 0
        self.in_channel: Counter[tuple[QueueKey, int]] = Counter()

    def __len__(self) -> int:
        return self._num_requests

    def kind(self, model: str, num_tokens: int, priority: int) -> QueueKey:
        """The kind of a request."""
        return QueueKey(priority, model, num_tokens > self._short_tokens)

    def check_capacity(self, model: str, num_tokens: int, caller: int) -> None:
        """Raise QueueFullError if every request of at least `num_tokens` would be refused."""
        if self._has_lanes and num_tokens <= self._short_tokens:
            with suppress(QueueFullError):
                self._check_room(model, False, num_tokens, caller)
                return
        self._check_room(model, self._has_lanes, num_tokens, caller)

    def put(self, call: T) -> None:
        """Let a request wait. Raises QueueFullError; a caller that has none here may have one."""
        kind = call.kind
        lane = kind.is_long and self._has_lanes
        self._check_room(kind.model, lane, call.left, call.caller)
        queue = self._queues.get(kind)
        if queue is None:
            queue = self._queues[kind] = FairQueue(self._limits.max_batch_tokens)
        if not queue.num_requests:
            self._ready[kind] = None
            # One that had no requests has no claim to the time before them.
            self._used[kind] = max(self._used.get(kind, 0.0), self._clock.get(kind.priority, 0.0))
        queue.put(call)
        self._count(call, 1)

    def take(self) -> T:
        """The next request, which is counted until it is `sent`; there must be one."""
        return self._take(min(self._ready, key=self._order))

    def take_unlike(self) -> T | None:
        """As `take`, of those requests like which there is none in the channel; None if there are none."""
        for kind in sorted(self._ready, key=self._order):
            present = {caller for of, caller in self.in_channel if of == kind}
            if self._queues[kind].bring_forward(present):
                return self._take(kind)
        return None

    def _order(self, kind: QueueKey) -> tuple[int, float]:
        return kind.priority, self._used[kind]

    def _take(self, kind: QueueKey) -> T:
        queue = self._queues[kind]
        call = queue.head()
        queue.take(call.left)
        self._clock[kind.priority] = self._used[kind]
        self._used[kind] += call.left / self._weights[kind.model]
        self._forget_empty(kind)
        return call

    def sent(self, call: T) -> None:
        """Count a request that was taken no more: a drain ends once all counted ones are in the engine."""
        self._count(call, -1)

    def remove(self, call: T) -> None:
        """Forget a request that waits."""
        self._queues[call.kind].remove(call)
        self._forget_empty(call.kind)
        self._count(call, -1)

    def _forget_empty(self, kind: QueueKey) -> None:
        if not self._queues[kind].num_requests:
            del self._ready[kind]

    def _count(self, call: T, sign: int) -> None:
        self._num_requests += sign
        lane = call.kind.is_long and self._has_lanes
        self._counts.add(self._numbers[call.kind.model], lane, sign, sign * call.left)

    def _check_room(self, model: str, lane: bool, num_tokens: int, caller: int) -> None:
        backlog = self._counts.total(self._numbers[model], lane)
        if may_wait(self._limits, backlog.num_requests + 1, backlog.num_tokens + num_tokens):
            return
        if not caller or self._has_one(caller, model, lane):
            raise why_full(self._limits, model, backlog, num_tokens)

    def _has_one(self, caller: int, model: str, lane: bool) -> bool:
        """Whether a request of the caller waits, here or likely in the engine: one may be in a step."""

        def is_of(kind: QueueKey) -> bool:
            return kind.model == model and (kind.is_long and self._has_lanes) == lane

        if any(is_of(kind) and self._queues[kind].has(caller) for kind in self._ready):
            return True
        sent = (count for (kind, of), count in self.in_channel.items() if of == caller and is_of(kind))
        return sum(sent) > 1
