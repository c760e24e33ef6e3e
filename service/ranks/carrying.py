"""Changes placements while steps run: weights move in slices between steps, then all ranks switch."""

import time
from collections.abc import Callable

from expertd.service.engine.errors import SchedulerClosedError
from expertd.service.moe.placement import Placement
from expertd.service.moe.placement.rounds import Round, rounds
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import MATRICES
from expertd.service.ranks.group import RankGroup
from expertd.service.ranks.moves import Kind, MoveCommand
from expertd.service.ranks.placements import PlacementStore

MOST_SECONDS = 1e-3
"""What a step may wait for the slice before it."""

_AIMED_SECONDS = 0.5 * MOST_SECONDS
_FIRST_BYTES = _LEAST_BYTES = 64 * 1024


class SliceSize:
    """The bytes that move at once, from the time that slices took."""

    def __init__(self) -> None:
        self.num_bytes = _FIRST_BYTES

    def note(self, num_bytes: int, seconds: float) -> None:
        """Aim at half of the time that is allowed; at most twice as many bytes as before."""
        fitting = int(num_bytes * _AIMED_SECONDS / max(seconds, 1e-9))
        self.num_bytes = max(_LEAST_BYTES, min(fitting, 2 * self.num_bytes))


class Carrier:
    """Carries out changes, one at a time. `moves` and `seconds` count over all of a model's.

    region  see `MoveCommand`
    """

    def __init__(
        self, placements: PlacementStore, num_models: int, stopped: Callable[[], bool], region: int
    ) -> None:
        self.moves = [0] * num_models
        self.seconds = [0.0] * num_models
        self._placements, self._stopped = placements, stopped
        self._region = region
        self._slice = SliceSize()
        self._last = 0

    def carry_out(self, group: RankGroup, model: int, shape: LayerShape, target: Placement) -> None:
        """Go over to `target`, round by round; rounds that ended before an error are kept.

        Raises DeviceLostError if a rank is lost, and SchedulerClosedError once `stopped` is true.
        """
        for each in rounds(self._placements.get(model), target):
            began = time.perf_counter()
            self._fetch(group, model, shape, each)
            for matrix in range(len(MATRICES)):  # each of them may take as long as a slice
                self._command(group, model, Kind.PREPARE, each, matrix)
            self._command(group, model, Kind.SWITCH, each)
            self._placements.set(group.generation, model, each.placement)
            self.moves[model] += len(each.fetches)
            self.seconds[model] += time.perf_counter() - began

    def _fetch(self, group: RankGroup, model: int, shape: LayerShape, each: Round) -> None:
        done = 0
        while done < shape.expert_bytes:
            end = min(done + self._slice.num_bytes, shape.expert_bytes)
            seconds = self._command(group, model, Kind.FETCH, each, done, end)
            self._slice.note(end - done, seconds)
            done = end

    def _command(
        self, group: RankGroup, model: int, kind: Kind, each: Round, start: int = 0, end: int = 0
    ) -> float:
        if self._stopped():
            raise SchedulerClosedError("the server is shutting down")
        self._last += 1
        command = MoveCommand(self._last, model, kind, each.fetches, start, end, self._region)
        return group.move(self._last, command.packed())
