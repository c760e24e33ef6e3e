"""A step on its way through the device."""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from expertd.service.moe.request import StepResult


class _Progress(Protocol):
    """A CUDA event."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class RunningStep:
    """A step that has begun.

    progress  what ends with it
    offsets   int32 [G + 1] in pinned memory, which a later step overwrites
    ended     called at its end, whether it succeeded or not: seconds that it took
    result    makes the result from a copy of the offsets, and those seconds
    """

    def __init__(
        self,
        progress: _Progress,
        offsets: NDArray[np.int32],
        ended: Callable[[], float],
        result: Callable[[NDArray[np.int32], float], StepResult],
    ) -> None:
        self._progress = progress
        self._offsets = offsets
        self._ended = ended
        self._result = result
        self._seconds: float | None = None

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        try:
            return self._progress.query()
        except RuntimeError:  # the device has failed, as `wait` will report
            return True

    def wait(self) -> float:
        """Wait for the outputs; the seconds that the step took. Raises if it failed.

        Another step may begin before `finish` if each request has its output in memory of its own.
        """
        if self._seconds is None:
            try:
                self._progress.synchronize()
            finally:
                self._seconds = self._ended()
            self._offsets = self._offsets.copy()
        return self._seconds

    def finish(self) -> StepResult:
        """Wait for the result. Raises if the step failed."""
        seconds = self.wait()
        return self._result(self._offsets, seconds)


class DoneStep:
    """A step that was done when it began, as on a CPU."""

    def __init__(self, result: StepResult) -> None:
        self._step_result = result

    def is_done(self) -> bool:
        """True."""
        return True

    def wait(self) -> float:
        """The seconds that it took."""
        return self._step_result.compute_seconds

    def finish(self) -> StepResult:
        """The result."""
        return self._step_result
