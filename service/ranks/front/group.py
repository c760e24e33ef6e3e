"""Ranks that run steps together, until one of them is lost."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from expertd.service.engine.errors import DeviceLostError
from expertd.service.engine.step_time import StepTime
from expertd.service.ranks.front.rank import Inbox, Rank
from expertd.service.ranks.front.starting import end_ranks, map_seconds
from expertd.service.ranks.messages import StepEnd
from expertd.service.ranks.regions import SharedRegion
from expertd.service.ranks.setup import MAX_SENT, SPIN_SECONDS, STOP

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25  # between two looks for ranks that were stopped, and at the time of a step
_ANSWER_SECONDS = 120.0  # capturing the CUDA graphs of all layers takes seconds
_STOP_SECONDS = 5.0  # on a busy machine, a process that ends takes seconds
_ALONE_SECONDS = 1.0  # for other ranks to fail too: those that wait for one that failed alone never return


class RankGroup:
    """Ranks that have loaded. `look` is for one thread at a time, also `begin` and `wait`; the rest for any.

    generation      tells it from other groups
    ranks           its members, by their numbers
    lost            why it is lost, None: it is not. Every waiting ends then, that for steps once `end` says
                    that no rank runs any: until then their memory is not free
    step_seconds    that a step may take
    why_nodes_lost  says why ranks of other nodes are lost; asked often
    """

    def __init__(
        self,
        generation: int,
        ranks: Sequence[Rank],
        inbox: Inbox,
        step_seconds: float,
        why_nodes_lost: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.generation = generation
        self.ranks = ranks
        self.lost: str | None = None
        self._inbox = inbox
        self._why_nodes_lost = why_nodes_lost
        self._is_over = False  # no rank runs a step any more
        self._flights: dict[
            int, dict[int, StepEnd]
        ] = {}  # of steps that are not over: their ends so far, by rank
        self._first_step = StepTime("a rank", step_seconds)
        self._answer_seconds = _ANSWER_SECONDS + MAX_SENT * step_seconds  # after the steps that were sent

    def look(self, seconds: float = _LOOK_SECONDS) -> None:
        """Take what ranks say, and notice those that are lost; at most for `seconds`."""
        if (why := self._inbox.take(self.ranks, seconds)) is not None:
            self.lose(why)
        for rank in self.ranks:
            if (why := rank.why_gone()) is not None:
                self.lose(why)
        first = min(list(self._flights), default=None)
        if (late := self._first_step.why_late(first) or self._why_nodes_lost()) is not None:
            self.lose(late)

    def map(self, regions: Sequence[SharedRegion]) -> None:
        """Have all ranks map regions, and wait until they have. Raises DeviceLostError, RuntimeError."""
        self.check()
        for region in regions:
            for rank in self.ranks:
                rank.map(region)
        for region in regions:
            self._wait(partial(self._is_mapped, region.number), map_seconds([region]), "all to map memory")
            for rank in self.ranks:
                if error := rank.mapped[region.number]:
                    raise RuntimeError(f"{error} (rank {rank.number})")

    def unmap(self, region: SharedRegion) -> None:
        """Have all ranks forget a region that no step uses any more, and wait until they have closed it.

        Raises DeviceLostError.
        """
        for rank in self.ranks:
            rank.unmap(region.number)
        closed = partial(self._is_closed, region.number)
        self._wait(closed, map_seconds([region]), "all to close memory")

    def ask(self, *message: Any) -> dict[int, list[Any]]:
        """Each rank's answer about partitions, which it gives between two steps; for one thread at a time.

        Raises DeviceLostError.
        """
        for rank in self.ranks:
            rank.answer = None
            rank.send(*message)
        self._wait(lambda: all(rank.answer for rank in self.ranks), self._answer_seconds, "an answer")
        return {rank.number: rank.answer or [] for rank in self.ranks}

    def record(self, files: Mapping[int, int], *message: Any) -> dict[int, str]:
        """Each rank's answer about a recording: an error, or ""; for one thread at a time.

        files  descriptors that go with the message, by rank

        Raises DeviceLostError.
        """
        self.check()
        ranks = [rank for rank in self.ranks if not files or rank.number in files]
        for rank in ranks:
            rank.recorded = None
            rank.send(*message, descriptors=[files[rank.number]] if files else ())
        done = lambda: all(rank.recorded is not None for rank in ranks)  # noqa: E731
        self._wait(done, self._answer_seconds, "an answer about a recording")
        return {rank.number: rank.recorded or "" for rank in ranks}

    def check(self) -> None:
        """Raise DeviceLostError if a rank is lost."""
        if self.lost is not None:
            raise DeviceLostError(self.lost)

    def begin(self, number: int, command: bytes) -> None:
        """Send a step to all ranks. Raises DeviceLostError."""
        with self._inbox.putting:
            self.check()
            self._flights[number] = {}
            self._put(command)

    def move(self, number: int, command: bytes) -> float:
        """Have all ranks carry out a `MoveCommand` between two steps; the seconds of the slowest.

        For one thread at a time, any. Raises DeviceLostError, also if it fails on a rank, which is then lost.
        """
        with self._inbox.putting:
            self.check()
            self._put(command)

        def has_moved() -> bool:
            moved = [rank.moved for rank in self.ranks if rank.moved[0] == number]
            # If one has failed, others may wait for that rank.
            return len(moved) == len(self.ranks) or any(error for _, _, error in moved)

        self._wait(has_moved, self._answer_seconds, "a move of experts")
        for rank in self.ranks:
            if rank.moved[0] == number and rank.moved[2]:
                self.lose(f"rank {rank.number}: moving experts failed: {rank.moved[2]}")
        self.check()
        return max(rank.moved[1] for rank in self.ranks)

    def is_done(self, number: int) -> bool:
        """Whether `wait` would return, or raise, at once."""
        if self._is_over:
            return True
        for rank in self.ranks:
            while (data := rank.rings.ends.take()) is not None:
                end = StepEnd.unpacked(data)
                if end.number in self._flights:  # else it has failed on another rank, long before
                    self._flights[end.number][rank.number] = end
        return len(self._flights[number]) == len(self.ranks)

    def wait(self, number: int) -> dict[int, StepEnd]:
        """Each rank's end of a step, once. Raises DeviceLostError; RuntimeError if it failed on all ranks."""
        bell = self._inbox.bell
        bell.wait(lambda: self.is_done(number) or self._has_error(number), SPIN_SECONDS)
        if not self.is_done(number) and not bell.wait(lambda: self.is_done(number), 0.0, _ALONE_SECONDS):
            self._lose_failed(number, "the step failed on some ranks alone")
            bell.wait(lambda: self.is_done(number), 0.0)
            del self._flights[number]
            self.check()
        num_ranks, ends = len(self.ranks), self._flights[number]
        errors = [end.error for _, end in sorted(ends.items()) if end.error]
        refused = [error for error in errors if error.startswith("ValueError")]
        if errors and (len(errors) < num_ranks or not refused):
            self._lose_failed(number, "a step failed")  # the ranks may be at different operations
        del self._flights[number]
        if len(ends) == num_ranks and not errors:
            return ends
        if len(errors) < num_ranks:
            self.check()
        raise RuntimeError((refused or errors)[0])

    def lose(self, why: str) -> None:
        """Give the ranks up."""
        self.lost = self.lost or why
        self._inbox.wake()

    def stop(self) -> None:
        """End the ranks after their present steps."""
        for rank in self.ranks:
            rank.send(STOP)
        until = time.monotonic() + _STOP_SECONDS
        for rank in self.ranks:
            gone = rank.why_gone(max(0.0, until - time.monotonic()))
            rank.end()
            if rank.process.returncode != 0:
                slow = f"expected it to end within {_STOP_SECONDS:g} s; it was killed"
                logger.warning("shutting down: %s", gone or f"rank {rank.number}: {slow}")
        self.end()

    def end(self) -> None:
        """End the ranks at once."""
        self.lose("the ranks have ended")
        end_ranks(self.ranks)
        self._is_over = True
        self._inbox.bell.ring()

    def _put(self, command: bytes) -> None:
        for rank in self.ranks:
            rank.put(command)

    def _wait(self, condition: Callable[[], bool], seconds: float, expected: str) -> None:
        """Wait for what ranks say. Raises DeviceLostError."""
        if not self._inbox.wait_for(lambda: self.lost is not None or condition(), seconds):
            self.lose(f"a rank hangs: expected {expected} within {seconds:g} s, got none")
        self.check()

    def _is_mapped(self, region: int) -> bool:
        return all(rank.mapped.get(region) is not None for rank in self.ranks)

    def _is_closed(self, region: int) -> bool:
        return all(region not in rank.closing for rank in self.ranks)

    def _has_error(self, number: int) -> bool:
        return any(end.error for end in self._flights[number].values())

    def _lose_failed(self, number: int, why: str) -> None:
        """Give the ranks up because of a step."""
        errors = {rank: end.error for rank, end in self._flights[number].items() if end.error}
        self.lose(f"{why}: {errors[min(errors)]}")
