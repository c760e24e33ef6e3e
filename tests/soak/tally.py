"""Counts of what became of requests, in memory that all processes of a soak share."""

import math
import multiprocessing as mp
from enum import IntEnum
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any

# Of one process that has imported what callers need, torch among it: else each would take seconds for that.
FORKSERVER = mp.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["tests.soak.soaking"])
_BUCKETS_PER_DOUBLING = 8
_FIRST_SECONDS = 20e-6
_NUM_BUCKETS = 160


class Phase(IntEnum):
    """What happens to the server."""

    SERVING = 0
    STOPPING = 1  # by SIGTERM, until another one serves
    KILLED = 2


OUTCOMES = ("sent", "right", "refused", "cancelled", "cut", "lost", "wrong", "failed")
"""refused: properly (4xx, 503, a timeout); cut: its server was ended; lost: no answer from one that owes it
(`Stage.owes_answer`); failed: 5xx other than 503."""


class Tally:
    """The counts of one kind of callers, of which one process writes each."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._counts: Any = RawArray("q", len(OUTCOMES))
        self._buckets: Any = RawArray("q", _NUM_BUCKETS)

    def count(self, outcome: str) -> None:
        """One more."""
        self._counts[OUTCOMES.index(outcome)] += 1

    def took(self, seconds: float) -> None:
        """A request was answered right."""
        place = int(_BUCKETS_PER_DOUBLING * math.log2(max(seconds, _FIRST_SECONDS) / _FIRST_SECONDS))
        self._buckets[min(place, _NUM_BUCKETS - 1)] += 1
        self.count("right")

    def counts(self) -> dict[str, int]:
        """All counts by outcome."""
        return dict(zip(OUTCOMES, self._counts, strict=True))

    def percentile_ms(self, part: float) -> float:
        """Milliseconds within which this part of the right answers came, rounded up to a twelfth."""
        buckets = list(self._buckets)
        left = part * sum(buckets)
        for place, count in enumerate(buckets):
            left -= count
            if left <= 0:
                return round(1e3 * _FIRST_SECONDS * 2 ** ((place + 1) / _BUCKETS_PER_DOUBLING), 2)
        return math.inf


class Stage:
    """The present phase, how many there were, and whether the soak is over."""

    def __init__(self) -> None:
        self._phase: Any = RawValue("i", Phase.SERVING)
        self._changes: Any = RawValue("q", 0)
        self._stop: Any = RawValue("q", -1)  # which of the changes began the last stop by SIGTERM
        self._is_over: Any = RawValue("b", False)

    @property
    def phase(self) -> Phase:
        return Phase(self._phase.value)

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._changes.value += 1
        if phase is Phase.STOPPING:
            self._stop.value = self._changes.value
        self._phase.value = phase

    def finish(self) -> None:
        """Have callers send nothing more; the phase stays, as does what is owed to them."""
        self._is_over.value = True

    @property
    def is_over(self) -> bool:
        parent = mp.parent_process()
        return bool(self._is_over.value) or (parent is not None and not parent.is_alive())

    @property
    def mark(self) -> int:
        """Differs from an earlier one if the server may have been ended since."""
        return int(self._changes.value) if self.phase is Phase.SERVING else -1

    def owes_answer(self, mark: int, is_whole: bool = False) -> bool:
        """Whether the server must answer, or refuse, a request that was sent when the stage had `mark`.

        It need not if it was ended since, unless that was by SIGTERM, and the request had been sent whole
        when the stage still had `mark` (`is_whole`): `stop` then has it read before the signal.
        """
        return mark >= 0 and (mark == self.mark or (is_whole and mark + 1 == self._stop.value))
