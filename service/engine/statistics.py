"""What a model's requests and steps took up to now, as sums."""

from collections.abc import Sequence
from dataclasses import dataclass, field

_NS = 1e9


@dataclass(slots=True)
class Total:
    """How often something happened, and the nanoseconds that it took."""

    count: int = 0
    ns: int = 0

    def add(self, count: int, seconds: float) -> None:
        """Add `count` times that took `seconds` together."""
        self.count += count
        self.ns += round(seconds * _NS)


@dataclass(slots=True)
class StepSums:
    """The steps of a model that succeeded.

    last_ms  when the last one ended, in milliseconds since 1970; 0: there was none
    queue    the requests of all steps, from acceptance to the start of their step
    compute  the same requests, with what their step took
    by_size  the steps, by their tokens rounded up to a power of two: a few entries, whatever the limits
    """

    last_ms: int = 0
    tokens: int = 0
    steps: int = 0
    queue: Total = field(default_factory=Total)
    compute: Total = field(default_factory=Total)
    by_size: dict[int, Total] = field(default_factory=dict)

    def add(self, num_tokens: int, seconds: float, queue_seconds: Sequence[float]) -> None:
        """Count a step that took `seconds`, whose requests had waited `queue_seconds`."""
        self.tokens += num_tokens
        self.steps += 1
        self.queue.add(len(queue_seconds), sum(queue_seconds))
        self.compute.add(len(queue_seconds), seconds * len(queue_seconds))
        size = 1 << max(0, num_tokens - 1).bit_length()
        total = self.by_size.get(size)
        if total is None:
            total = self.by_size[size] = Total()
        total.add(1, seconds)


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """A model's steps, and its requests from their headers to the end of their answers.

    success  with an output
    failure  with any other answer, or with none because the client had disconnected
    """

    steps: StepSums
    success: Total
    failure: Total
