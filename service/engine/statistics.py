"""What a model's requests and steps took up to now, as sums."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

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

    def add(
        self, num_tokens: NDArray[Any], seconds: NDArray[Any], num_requests: NDArray[Any], waited: float
    ) -> None:
        """Count steps by tokens, seconds and requests, each [steps]; and the seconds that these waited."""
        self.tokens += int(num_tokens.sum())
        self.steps += len(num_tokens)
        requests = int(num_requests.sum())
        self.queue.add(requests, waited)
        self.compute.add(requests, float(seconds @ num_requests))
        bits = np.frexp(np.maximum(num_tokens - 1, 0))[1]  # of the largest number below
        for each in set(bits.tolist()):  # np.unique takes longer
            of_size = bits == each
            total = self.by_size.setdefault(1 << each, Total())
            total.add(int(of_size.sum()), float(seconds[of_size].sum()))

    def copy(self) -> "StepSums":
        """The sums as they are now."""
        by_size = {size: replace(total) for size, total in self.by_size.items()}
        return replace(self, queue=replace(self.queue), compute=replace(self.compute), by_size=by_size)


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """A model's steps, and its requests from their headers to the end of their answers.

    success  with an output
    failure  with any other answer, or with none because the client had disconnected
    """

    steps: StepSums
    success: Total
    failure: Total
