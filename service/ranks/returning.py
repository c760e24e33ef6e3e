"""Lost ranks that start again beside those that go on."""

import logging
import time
from collections.abc import Callable

from expertd.service.ranks.inbox import Inbox
from expertd.service.ranks.rank import Rank
from expertd.service.ranks.starting import LoadFailedError, check_loading, end_ranks

logger = logging.getLogger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.1, 5.0
"""Seconds before ranks that fail at once start again."""


class Returning:
    """Starts lost ranks until they have loaded. For one thread, which calls `look` often.

    start  starts the rank with this number; raises OSError
    """

    def __init__(self, start: Callable[[int], Rank], inbox: Inbox) -> None:
        self._start, self._inbox = start, inbox
        self._due: dict[int, float] = {}  # when to start those that do not run
        self._pauses: dict[int, float] = {}
        self._running: list[Rank] = []

    def add(self, number: int) -> None:
        """Start a rank, at the next look."""
        self._due[number], self._pauses[number] = time.monotonic(), FIRST_PAUSE

    def look(self) -> None:
        """Start ranks, and hear those that load. Takes no time but that of starting a process."""
        now = time.monotonic()
        for number in [number for number, due in self._due.items() if due <= now]:
            try:
                self._running.append(self._start(number))
                del self._due[number]
            except OSError as error:
                self._again(number, str(error))
        for rank in list(self._running):
            try:
                check_loading([rank], self._inbox, 0)
            except LoadFailedError as error:
                self.lose(rank, str(error))

    def loaded(self) -> list[Rank]:
        """The ranks that have loaded."""
        return [rank for rank in self._running if rank.about is not None]

    def lose(self, rank: Rank, why: str) -> None:
        """A rank is lost again."""
        self._running.remove(rank)
        end_ranks([rank])
        self._again(rank.number, why)

    def release(self, rank: Rank) -> None:
        """A rank is back among the others."""
        self._running.remove(rank)
        del self._pauses[rank.number]

    def end(self) -> None:
        """End those that run, and start no more."""
        end_ranks(self._running)
        self._running, self._due = [], {}

    def _again(self, number: int, why: str) -> None:
        pause = self._pauses[number]
        logger.error("rank %d could not be started again: %s", number, why.removeprefix("loading: "))
        self._due[number] = time.monotonic() + pause
        self._pauses[number] = min(2 * pause, LAST_PAUSE)
