"""A step on its way through the device."""

from collections.abc import Callable
from typing import Protocol

from expertd.service.moe.request import StepResult


class _Progress(Protocol):
    """A CUDA event or stream."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class RunningStep:
    """A step that has begun: `finish` waits for `progress`, and makes the result."""

    def __init__(self, progress: _Progress, result: Callable[[], StepResult]) -> None:
        self._progress = progress
        self._result = result

    def is_done(self) -> bool:
        """Whether `finish` would return, or raise, at once."""
        try:
            return self._progress.query()
        except RuntimeError:  # the device has failed, as `finish` will report
            return True

    def finish(self) -> StepResult:
        """Wait for the result. Raises if the step failed."""
        return self._result()


class DoneStep:
    """A step that was done when it began, as on a CPU."""

    def __init__(self, result: StepResult) -> None:
        self._step_result = result

    def is_done(self) -> bool:
        """True."""
        return True

    def finish(self) -> StepResult:
        """The result."""
        return self._step_result
