"""How long the ranks have been at a step: one that never ends means that a rank hangs."""

import time
from collections.abc import Callable

_LONGEST_LOOK = 1.0  # seconds; longer between two looks, this process did not run, and perhaps no rank did


class StepTime:
    """Notices a step that takes more than `limit` seconds as the first of those in flight.

    A step behind another waits for it, and its own time begins when that has ended.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._number: int | None = None
        self._seconds = 0.0
        self._looked = clock()

    def why_late(self, first: int | None) -> str | None:
        """Look at the number of the first step in flight, None: there is none. A sentence if it is late."""
        now = self._clock()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK), now
        if first is None or first != self._number:
            self._number, self._seconds = first, 0.0
            return None
        self._seconds += passed
        if self._seconds <= self._limit:
            return None
        return f"a rank hangs: expected the end of a step within {self._limit:g} s, got none"
