"""The requests that wait for a step, by model, and what recent steps of each model took.

Requests of a lower priority number come first, and among equal ones those that came first. A more urgent
request waits for the steps that run.
"""

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from expertd.service.engine.errors import QueueFullError
from expertd.service.engine.steps import Pending, Runner, State
from expertd.service.settings.parts import Limits


@dataclass(slots=True)
class Queue:
    """Of one model."""

    runner: Runner
    waiting: deque[Pending] = field(default_factory=deque)  # in the order in which they will be computed
    num_tokens: int = 0  # of those waiting
    step_seconds: float = 0.0  # smoothed over recent steps
    last_seconds: dict[int, float] = field(default_factory=dict)  # of the last step of each size
    failures: int = 0  # consecutive steps that raised

    def put(self, pending: Pending) -> None:
        """Let a request wait, behind those as urgent as it is."""
        waiting, place = self.waiting, len(self.waiting)
        while place and waiting[place - 1].priority > pending.priority:
            place -= 1
        waiting.insert(place, pending)
        self.num_tokens += pending.request.num_tokens

    def likely_seconds(self, num_tokens: int) -> float:
        """Seconds of the last step with about as many tokens; 0: there was none."""
        return self.last_seconds.get(num_tokens.bit_length(), 0.0)

    def note(self, num_tokens: int, seconds: float) -> None:
        """Keep what a step took."""
        self.step_seconds = 0.8 * self.step_seconds + 0.2 * seconds if self.step_seconds else seconds
        self.last_seconds[num_tokens.bit_length()] = seconds


class Queues:
    """All queues; models with waiting requests take turns. Who changes them holds the scheduler's lock."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._of: dict[str, Queue] = {}
        self.turns: deque[str] = deque()  # models with waiting requests, next one first

    def set_runners(self, runners: Mapping[str, Runner]) -> None:
        """Have an empty queue for each model."""
        self._of = {name: Queue(runner) for name, runner in runners.items()}

    def __getitem__(self, model: str) -> Queue:
        return self._of[model]

    def check_room(self, model: str, num_tokens: int) -> None:
        """Raise QueueFullError if there is none for a request of `num_tokens`."""
        queue, limits = self._of[model], self._limits
        if len(queue.waiting) >= limits.max_queue_requests:
            waiting = f"{len(queue.waiting)} requests of at most {limits.max_queue_requests}"
        elif queue.num_tokens + num_tokens > limits.max_queue_tokens:
            waiting = f"{queue.num_tokens} tokens of at most {limits.max_queue_tokens}"
        else:
            return
        steps = math.ceil(queue.num_tokens / limits.max_batch_tokens) + 1
        retry_after = max(1, math.ceil(steps * queue.step_seconds))
        raise QueueFullError(f"the queue of model {model} is full: {waiting} are waiting", retry_after)

    def add(self, pending: Pending) -> Queue:
        """Put a request in its queue. Raises as `check_room` does."""
        model, num_tokens = pending.model, pending.request.num_tokens
        self.check_room(model, num_tokens)
        queue = self._of[model]
        if not queue.waiting:
            self.turns.append(model)
        queue.put(pending)
        return queue

    def remove(self, pending: Pending) -> bool:
        """Cancel a request; False if it does not wait any more."""
        if pending.state is not State.WAITING:
            return False
        pending.state = State.CANCELLED
        queue = self._of[pending.model]
        queue.waiting.remove(pending)
        queue.num_tokens -= pending.request.num_tokens
        if not queue.waiting:
            self.turns.remove(pending.model)
        return True

    def all_waiting(self) -> list[Pending]:
        """The waiting requests of all models."""
        return [pending for queue in self._of.values() for pending in queue.waiting]

    def is_alone(self, pending: Pending) -> bool:
        """Whether no other request waits."""
        return list(self.turns) == [pending.model] and len(self._of[pending.model].waiting) == 1

    def next_tokens(self) -> int:
        """The waiting tokens of the model whose turn it is."""
        return self._of[self._next_model()].num_tokens if self.turns else 0

    def next_step(self) -> list[Pending]:
        """Take the requests of the next step, all of one model, up to `max_batch_tokens`."""
        model = self._next_model()
        self.turns.remove(model)
        queue = self._of[model]
        step: list[Pending] = []
        room = self._limits.max_batch_tokens
        while queue.waiting and (queue.waiting[0].request.num_tokens <= room or not step):
            pending = queue.waiting.popleft()
            pending.state = State.STARTED
            room -= pending.request.num_tokens
            step.append(pending)
        queue.num_tokens -= self._limits.max_batch_tokens - room
        if queue.waiting:
            self.turns.append(model)
        return step

    def _next_model(self) -> str:
        """The model with the most urgent request, of several the one whose turn it is."""
        if len(self.turns) == 1:
            return self.turns[0]
        return min(self.turns, key=lambda model: self._of[model].waiting[0].priority)
