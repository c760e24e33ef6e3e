"""The ranks that work together, from their start until one of them is lost."""

import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from expertd.service.engine.errors import DeviceLostError
from expertd.service.ranks.messages import StepEnd
from expertd.service.ranks.rank import Rank
from expertd.service.ranks.regions import Region
from expertd.service.ranks.ring import Bell
from expertd.service.ranks.setup import MAP, SPIN_SECONDS, STOP, UNMAP, RankSetup
from expertd.service.ranks.step_time import StepTime

_CHECK_SECONDS = 0.25  # between two looks for ranks that were stopped, and at the time of a step
_MAP_SECONDS = 60.0  # locking memory for a GPU takes about 0.3 s for each GB
_ANSWER_SECONDS = 120.0  # capturing the CUDA graphs of all layers takes seconds
_STOP_SECONDS = 2.0
_ALONE_SECONDS = 1.0  # for other ranks to fail too: those that wait for a rank that failed alone never end


class LoadFailedError(Exception):
    """A rank could not load; is_expected: the text is a sentence about the settings or files."""

    def __init__(self, text: str, is_expected: bool) -> None:
        super().__init__(text)
        self.is_expected = is_expected


class RankGroup:
    """Started ranks. `begin` and `wait` are for one thread at a time, the rest is safe from any.

    step_seconds  that a step may take
    why_beside    says why the ranks are lost by other signs than their own; asked often

    Every waiting ends when a rank is lost: its process has ended, or was stopped, or it failed alone.
    """

    def __init__(
        self,
        setups: Sequence[RankSetup],
        step_seconds: float,
        why_beside: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.generation = setups[0].generation
        self.ranks: list[Rank] = []
        self.lost: str | None = None
        # The backend, device and partitions of the first rank that has loaded: all have the same.
        self.about: tuple[str, str, list[Any]] | None = None
        self._why_beside = why_beside
        self._bell = Bell()
        self._woken = Bell()  # wakes `watch`
        self._mapped: dict[int, dict[int, str]] = {}  # region -> rank -> error or ""
        self._answers: dict[int, list[Any]] = {}  # to the last question, by rank
        self._moved: dict[int, dict[int, tuple[float, str]]] = {}  # command -> rank -> seconds, error or ""
        self._changed = threading.Condition()
        self._putting = threading.Lock()  # all ranks get commands in one order
        self._ends: dict[int, dict[int, StepEnd]] = {}  # of steps that are not over, by rank
        self._first_step = StepTime(step_seconds)
        try:
            for setup in setups:
                self.ranks.append(Rank(setup, self._bell))
        except BaseException:
            self.end()
            raise

    def wait_loaded(self, stop: Callable[[], bool]) -> None:
        """Return once all ranks have loaded, or `stop` is true. Raises LoadFailedError."""
        while not stop() and not all(rank.loaded for rank in self.ranks):
            readable = self._readable(_CHECK_SECONDS / 5)
            for rank in readable:
                match rank.receive():
                    case ["loaded", str(backend), str(device)]:
                        rank.loaded = True
                        self.about = self.about or (backend, device, rank.partitions)
                    case ["failed", str(text), bool(is_expected)]:
                        raise LoadFailedError(f"rank {rank.number}: {text}", is_expected)
                    case ["device", memory, *of_kernels]:
                        rank.note_device(memory, *of_kernels)
                    case ["partitions", str(), list(shown)]:
                        rank.partitions = shown
                    case ["lost", str(text)]:
                        raise LoadFailedError(f"loading: {text}", False)
                    case _:
                        raise LoadFailedError(f"loading: {_why_gone(rank)}", False)
            for rank in self.ranks:
                if (why := rank.why_gone()) is not None and not self._readable(0):
                    raise LoadFailedError(f"loading: {why}", False)
            if (beside := self._why_beside()) is not None:
                raise LoadFailedError(f"loading: {beside}", False)

    def watch(self, stop: Callable[[], bool]) -> None:
        """Take the ranks' messages until one is lost, or `stop` is true."""
        try:
            while not stop() and self.lost is None:
                for rank in self._readable(_CHECK_SECONDS):
                    self._take(rank)
                for rank in self.ranks:
                    if (why := rank.why_gone()) is not None:
                        self.lose(why)
                first = min(list(self._ends), default=None)
                if (late := self._first_step.why_late(first) or self._why_beside()) is not None:
                    self.lose(late)
        finally:  # nobody may wait for messages that nobody takes
            self.lose("the server is shutting down")

    def map(self, regions: Sequence[Region]) -> None:
        """Have all ranks map regions, and wait until they have. Raises DeviceLostError, RuntimeError."""
        for region in regions:
            memory = region.memory
            what = MAP, region.number, memory.num_bytes, memory.offset
            for rank in self.ranks:
                rank.send(*what, descriptors=[memory.descriptor])
        for region in regions:
            with self._changed:
                if not self._changed.wait_for(partial(self._is_mapped, region.number), _MAP_SECONDS):
                    self.lose(f"a rank hangs: expected all to map memory within {_MAP_SECONDS:g} s")
                errors = self._mapped.pop(region.number, {})
            self.check()
            for number, error in errors.items():
                if error:
                    raise RuntimeError(f"rank {number}: {error}")

    def unmap(self, region: Region) -> None:
        """Have all ranks forget a region that no step uses any more."""
        for rank in self.ranks:
            rank.send(UNMAP, region.number)

    def ask(self, *message: Any) -> dict[int, list[Any]]:
        """Each rank's answer to a message, which it gives between two steps; for one thread at a time.

        Raises DeviceLostError.
        """
        self._answers.clear()
        for rank in self.ranks:
            rank.send(*message)
        with self._changed:
            if not self._changed.wait_for(self._is_answered, _ANSWER_SECONDS):
                self.lose(f"a rank hangs: expected an answer within {_ANSWER_SECONDS:g} s, got none")
        self.check()
        return dict(self._answers)

    def check(self) -> None:
        """Raise DeviceLostError if a rank is lost."""
        if self.lost is not None:
            raise DeviceLostError(self.lost)

    def begin(self, number: int, command: bytes) -> None:
        """Send a step to all ranks. Raises DeviceLostError."""
        self.check()
        self._ends[number] = {}
        self._put(command)

    def move(self, number: int, command: bytes) -> float:
        """Have all ranks carry out a `MoveCommand` between two steps; the seconds of the slowest.

        For one thread at a time, any. Raises DeviceLostError, also if it fails on a rank, which is then lost.
        """
        self.check()
        self._put(command)
        with self._changed:
            if not self._changed.wait_for(lambda: self._has_moved(number), _ANSWER_SECONDS):
                self.lose(f"a rank hangs: expected a move of experts within {_ANSWER_SECONDS:g} s, got none")
            moved = self._moved.pop(number, {})
        for rank, (_, error) in moved.items():
            if error:
                self.lose(f"rank {rank}: moving experts failed: {error}")
        self.check()
        return max(seconds for seconds, _ in moved.values())

    def is_done(self, number: int) -> bool:
        """Whether a step has ended on all ranks, or one is lost."""
        for rank in self.ranks:
            while (data := rank.rings.ends.take()) is not None:
                end = StepEnd.unpacked(data)
                if end.number in self._ends:  # else it has failed on another rank, long before
                    self._ends[end.number][rank.number] = end
        return self.lost is not None or len(self._ends[number]) == len(self.ranks)

    def wait(self, number: int) -> list[StepEnd]:
        """Each rank's end of a step, once. Raises DeviceLostError; RuntimeError if it failed on all ranks."""
        self._bell.wait(lambda: self.is_done(number) or self._first_error(number) != "", SPIN_SECONDS)
        if not self.is_done(number) and not self._bell.wait(
            lambda: self.is_done(number), 0.0, _ALONE_SECONDS
        ):
            self.lose(f"the step failed on some ranks alone: {self._first_error(number)}")
        by_rank = self._ends.pop(number)
        ends = [by_rank[rank] for rank in sorted(by_rank)]
        errors = [end.error for end in ends if end.error]
        refused = [error for error in errors if error.startswith("ValueError")]
        if errors and (len(errors) < len(self.ranks) or not refused):
            self.lose(f"a step failed: {errors[0]}")  # the ranks may be at different operations
        if len(ends) - len(errors) == len(self.ranks):
            return ends
        if len(errors) < len(self.ranks):
            self.check()
        raise RuntimeError((refused or errors)[0])

    def lose(self, why: str) -> None:
        """Give the ranks up: all that waits for them ends."""
        with self._changed:
            self.lost = self.lost or why
            self._changed.notify_all()
        self._bell.ring()
        self._woken.ring()

    def stop(self) -> None:
        """End the ranks after their present steps."""
        for rank in self.ranks:
            rank.send(STOP)
        until = time.monotonic() + _STOP_SECONDS
        for rank in self.ranks:
            rank.end(max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """End the ranks at once."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.end()

    def wake(self) -> None:
        """Have `wait_loaded` and `watch` look at `stop`."""
        self._woken.ring()

    def _readable(self, seconds: float) -> list[Rank]:
        """The ranks that have sent something or ended, once there are any; none after `seconds` or `wake`."""
        poll = select.poll()
        by_descriptor = {rank.connection.fileno(): rank for rank in self.ranks}
        for descriptor in (*by_descriptor, self._woken.descriptor):
            poll.register(descriptor, select.POLLIN)
        found = [descriptor for descriptor, _ in poll.poll(1000 * seconds)]
        if self._woken.descriptor in found:
            self._woken.clear()
        return [by_descriptor[descriptor] for descriptor in found if descriptor in by_descriptor]

    def _take(self, rank: Rank) -> None:
        """Take a message of a rank that has loaded."""
        match rank.receive():
            case ["mapped", int(region), str(error)]:
                with self._changed:
                    self._mapped.setdefault(region, {})[rank.number] = error
                    self._changed.notify_all()
            case ["device", memory, *of_kernels]:
                rank.note_device(memory, *of_kernels)
            case ["partitions", *answer]:
                with self._changed:
                    self._answers[rank.number] = answer
                    self._changed.notify_all()
            case ["lost", str(why)]:
                self.lose(why)
            case ["moved", int(number), float(seconds), str(error)]:
                with self._changed:
                    self._moved.setdefault(number, {})[rank.number] = seconds, error
                    self._changed.notify_all()
            case _:
                self.lose(_why_gone(rank))

    def _put(self, command: bytes) -> None:
        with self._putting:
            for rank in self.ranks:
                rank.put(command)

    def _has_moved(self, number: int) -> bool:
        moved = self._moved.get(number, {}).values()
        failed = any(error for _, error in moved)  # then others may wait for that rank
        return self.lost is not None or failed or len(moved) == len(self.ranks)

    def _is_mapped(self, region: int) -> bool:
        return self.lost is not None or len(self._mapped.get(region, {})) == len(self.ranks)

    def _is_answered(self) -> bool:
        return self.lost is not None or len(self._answers) == len(self.ranks)

    def _first_error(self, number: int) -> str:
        return next((end.error for end in self._ends[number].values() if end.error), "")


def _why_gone(rank: Rank) -> str:
    """For a rank whose socket has ended."""
    return rank.why_gone(_STOP_SECONDS) or f"rank {rank.number}: its socket was closed"
