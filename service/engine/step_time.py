"""How long a step has been running: one that never ends means that the device, or a rank, hangs."""

import time
from collections.abc import Callable

_LONGEST_LOOK = 1.0  # seconds; with a longer gap, this process was not scheduled, and perhaps no step ran


class StepTime:
    """Notices a step that takes more than `limit` seconds as the first of those in flight.

    A step behind another waits for it, and its own time begins when that has ended. who: what hangs then.
    what: it is, if not a step.
    """

    def __init__(
        self, who: str, limit: float, clock: Callable[[], float] = time.monotonic, what: str = "a step"
    ) -> None:
        self._who, self._limit, self._clock, self._what = who, limit, clock, what
        self._number: int | None = None
        self._seconds = 0.0
        self._looked = clock()

    def why_late(self, first: int | None, limit: float | None = None) -> str | None:
        """Look at the number of the first step in flight, None: there is none. A sentence if it is late.

        limit  of this step, if it is another one
        """
        now = self._clock()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK), now
        if first is None or first != self._number:
            self._number, self._seconds = first, 0.0
            return None
        self._seconds += passed
        limit = limit or self._limit
        if self._seconds <= limit:
            return None
        return f"{self._who} hangs: expected the end of {self._what} within {limit:.3g} s, got none"
