"""What waits for the steps of each model, in all processes of a server, and whether it leaves room."""

import math
from typing import NamedTuple

from expertd.service.engine.errors import QueueFullError, TooManyRequestsError
from expertd.service.settings.parts import Limits

_LANES = 2
_FIELDS = 4  # of a model's queue on a lane: those of `Backlog`


def num_cells(num_models: int) -> int:
    """The cells that one process needs, each a float64."""
    return num_models * _LANES * _FIELDS


class Backlog(NamedTuple):
    """What is queued, and how fast it is computed.

    step_seconds  of a step, smoothed; 0: not known
    step_tokens   of a step, at most; 0: not known
    """

    num_requests: int
    num_tokens: int
    step_seconds: float = 0.0
    step_tokens: int = 0


class QueueCounts:
    """The cells of all processes, in memory that they share; each writes those of its own row.

    Row 0 has the queues of the process that owns the device; the others have what waits in HTTP processes for
    room in their channels. Of a server without lanes, the first lane is all there is.

    cells  one row after the other
    row    of this process
    """

    def __init__(self, cells: "memoryview[float] | list[float]", num_models: int, row: int) -> None:
        self._cells = cells
        self._stride = num_cells(num_models)
        self._row = row

    def set(self, model: int, lane: int, backlog: Backlog) -> None:
        """Say what waits in this process for a model, by its number."""
        index = self._index(model, lane)
        for field, value in enumerate(backlog):
            self._cells[index + field] = value

    def add(self, model: int, lane: int, requests: int, tokens: int) -> None:
        """Add to what waits in this process."""
        index = self._index(model, lane)
        self._cells[index] += requests
        self._cells[index + 1] += tokens

    def clear(self) -> None:
        """Nothing waits in this process any more: it has ended."""
        for index in range(self._row * self._stride, (self._row + 1) * self._stride):
            self._cells[index] = 0.0

    def total(self, model: int, lane: int) -> Backlog:
        """What waits on a lane, in all processes."""
        first = self._first(model, lane)
        requests = sum(self._cells[first :: self._stride])
        tokens = sum(self._cells[first + 1 :: self._stride])
        return Backlog(int(requests), int(tokens), self._cells[first + 2], int(self._cells[first + 3]))

    def elsewhere(self, model: int) -> Backlog:
        """What waits on all lanes in HTTP processes."""
        requests = tokens = 0.0
        for lane in range(_LANES):
            first = self._first(model, lane) + self._stride
            requests += sum(self._cells[first :: self._stride])
            tokens += sum(self._cells[first + 1 :: self._stride])
        return Backlog(int(requests), int(tokens))

    def _first(self, model: int, lane: int) -> int:
        """The index in row 0."""
        return (model * _LANES + lane) * _FIELDS

    def _index(self, model: int, lane: int) -> int:
        return self._row * self._stride + self._first(model, lane)


def may_wait(limits: Limits, num_requests: int, num_tokens: int) -> bool:
    """Whether a queue may have this many requests and tokens."""
    return num_requests <= limits.max_queue_requests and num_tokens <= limits.max_queue_tokens


def why_full(limits: Limits, model: str, backlog: Backlog, num_tokens: int) -> QueueFullError:
    """The error for one more request of `num_tokens`, or more, if there is no room."""
    if backlog.num_requests >= limits.max_queue_requests:
        text = f"{backlog.num_requests} requests of at most {limits.max_queue_requests} are waiting"
    else:
        text = f"{backlog.num_tokens} tokens of at most {limits.max_queue_tokens} are waiting"
        text = text if num_tokens == 1 else f"{text}, and at least {num_tokens} more do not fit"
    steps = math.ceil(backlog.num_tokens / (backlog.step_tokens or limits.max_batch_tokens)) + 1
    return full_error(limits, f"the queue of model {model} is full: {text}", steps * backlog.step_seconds)


def full_error(limits: Limits, text: str, seconds: float | None) -> QueueFullError:
    """`seconds` until another try may succeed; None: it would not."""
    full = TooManyRequestsError if limits.blames_callers else QueueFullError
    return full(text, 0 if seconds is None else max(1, math.ceil(seconds)))
