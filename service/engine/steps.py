"""What the executor runs and whom it serves: submissions, steps, runners, observers."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from expertd.service.moe.request import LayerRequest, OutputMemory, StepResult

Done = Callable[[OutputMemory | Exception], object]
"""Called once for each request, with its output or the error that it fails with."""


class Step(Protocol):
    """A step that has begun on the device; implemented by `expertd.service.moe.runner.RunningStep`."""

    def is_done(self) -> bool:
        """Whether `finish` would return at once."""

    def wait(self) -> float:
        """Wait for the outputs; the seconds that the step took. Raises if it failed.

        Another step may begin before `finish` if each request has its output in memory of its own.
        """

    def finish(self) -> StepResult:
        """Wait for the result; raises if the step failed."""


class Runner(Protocol):
    """Computes steps; implemented by `expertd.service.moe.runner.LayerRunner`.

    A step whose `begin` or end raises DeviceLostError is no fault of its requests.
    """

    def validate(self, request: LayerRequest) -> None: ...

    def begin(self, requests: Sequence[LayerRequest]) -> Step:
        """Start a step while at most one other runs; with ranks, at most two."""


class StepObserver(Protocol):
    """Notified of every step after its answers, on the event loop; on a GPU, also on the worker thread."""

    def step_done(self, model: str, result: StepResult, queue_seconds: Sequence[float]) -> None:
        """queue_seconds: of each request whose first step this was, its time in the queue."""

    def step_failed(self, model: str, num_requests: int) -> None: ...


class State(Enum):
    WAITING = auto()
    STARTED = auto()
    CANCELLED = auto()


LAST_PRIORITY, DEFAULT_PRIORITY = 255, 128
"""Requests have a priority from 1, the most urgent, to 255."""


class StepTimes(NamedTuple):
    """When a request was in its queue and its steps, by time.perf_counter.

    began   of its first step, the one that succeeded if one did; None: it had none
    ended   of its last step, or when the request left the queue without one
    tokens  of its last step, those of other requests included; 0: unknown, or it failed
    """

    arrived: float
    began: float | None
    ended: float
    tokens: int


class Submission:
    """A request to the executor, until its `done` is called; `compute_seconds` is set before.

    `done` is called on the event loop, or directly on the worker thread: then it must return soon, because
    the next step waits for it. It must not raise.

    on_worker  whether it is called on the worker thread
    alone      the event loop has no other requests at present: if nothing else runs and the step is likely to
               be short, it runs there, after all that has arrived there; not with a short timeout
    priority   1 to 255; lower ones are computed first
    caller     the number of who sent it, `caller_number`; callers share a queue fairly
    timeout    seconds after which the output is of no use: if that is likely, it is not computed
    arrived    when it was accepted, as `deadline` by the executor's clock
    lane       the number of the lane whose queue it is in
    has_ample_time  its deadline was far away when it arrived: see `Queues`
    is_long  longer than a chunk: it may be computed in several steps
    deadline when its output is of no use any more
    begun    its tokens that steps have been given; running: steps that compute some of them
    outputs  of the chunks that are computed, by their first token
    error    what it is answered with once no step computes a part of it
    """

    __slots__ = (
        "alone",
        "arrived",
        "began",
        "begun",
        "caller",
        "compute_seconds",
        "deadline",
        "done",
        "error",
        "has_ample_time",
        "is_long",
        "lane",
        "model",
        "on_worker",
        "outputs",
        "priority",
        "request",
        "running",
        "state",
        "step_tokens",
        "timeout",
    )

    def __init__(
        self,
        model: str,
        request: LayerRequest,
        done: Done,
        *,
        on_worker: bool = False,
        alone: bool = False,
        priority: int = DEFAULT_PRIORITY,
        caller: int = 0,
        timeout: float | None = None,
    ) -> None:
        self.model = model
        self.lane = 0
        self.alone = alone
        self.timeout = timeout
        self.priority = priority
        self.caller = caller
        self.request = request
        self.done = done
        self.on_worker = on_worker
        self.arrived = 0.0
        self.deadline = math.inf
        self.began: float | None = None  # as in `StepTimes`
        self.compute_seconds = 0.0  # of its steps
        self.step_tokens = 0  # of the last of them, others' tokens included; 0: unknown
        self.state = State.WAITING  # until all of it has begun
        self.has_ample_time = False
        self.is_long = False
        self.begun = 0
        self.running = 0
        self.outputs: dict[int, OutputMemory] | None = None
        self.error: Exception | None = None

    def accept(self, now: float, lane: int = 0) -> None:
        """It has arrived, for a lane."""
        self.arrived, self.lane = now, lane
        if self.timeout is not None:
            self.deadline = now + self.timeout

    def take_done(self) -> Done:
        """What the answer is to be given to, once.

        For a request of a source, the caller of this holds the lock of the queues; else it is the event loop.
        """
        done, self.done = self.done, _ignore
        return done

    def times(self, now: float) -> StepTimes:
        """The times of a request that is answered `now`."""
        began, took = self.began, self.compute_seconds
        # In several steps, it waited between them.
        ended = now if began is None or self.is_long or not took else min(now, began + took)
        return StepTimes(self.arrived, began, ended, self.step_tokens)

    def still_has_ample_time(self, now: float) -> bool:
        """Whether it had far more time than it needs when it arrived, and has half of that left at least."""
        if not self.has_ample_time:
            return False
        return now - self.arrived < 0.5 * (self.deadline - self.arrived)

    @property
    def left(self) -> int:
        """The tokens that no step has been given."""
        return self.request.num_tokens - self.begun


@dataclass(slots=True)  # not frozen: that takes longer
class Chunk:
    """What a step computes of a request, from the token `start` on: in most cases, all of it."""

    submission: Submission
    request: LayerRequest
    start: int = 0


def num_tokens_of(chunks: Sequence[Chunk]) -> int:
    """The tokens of a step that computes `chunks`."""
    if len(chunks) == 1:  # as most often, when every microsecond counts
        return chunks[0].request.num_tokens
    return sum([chunk.request.num_tokens for chunk in chunks])


def caller_number(name: str) -> int:
    """The number of the caller whose key has this name; of all callers without a key: 0."""
    return zlib.crc32(name.encode())


def _ignore(answer: object) -> None:
    """Do nothing: the request was answered before."""
