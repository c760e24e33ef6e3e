"""Plans placements from the loads of all models, and carries them out while steps run.

Weights move in slices between steps, then all ranks switch.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from expertd.service.engine.errors import DeviceLostError, ExecutorClosedError, PlacementRefusedError
from expertd.service.engine.placement import PlacementState, PlanState
from expertd.service.moe.placement import Placement, global_placement, plan_change
from expertd.service.moe.placement.rounds import Round, rounds
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import MATRICES
from expertd.service.ranks.front.group import RankGroup
from expertd.service.ranks.front.staging import StagingRegion
from expertd.service.ranks.front.supervisor import Supervisor
from expertd.service.ranks.messages import MoveCommand, MoveKind
from expertd.service.ranks.placement import LoadWindow, PlacementStore
from expertd.service.ranks.setup import largest_expert
from expertd.service.ranks.worker.transport import spaced
from expertd.service.settings.model import Settings

logger = logging.getLogger(__name__)

# Plans by themselves wait for as much load for each expert: with less, chance decides.
_MIN_LOAD = 16

MAX_SECONDS = 1e-3
"""What a step may wait for the slice before it."""

_AIMED_SECONDS = 0.5 * MAX_SECONDS
_FIRST_BYTES = _MIN_BYTES = 64 * 1024

Job = Callable[[], None]


class Balancer:
    """See `expertd.service.engine.placement.Placements`. Runs from `start` to `stop`. Raises RuntimeError."""

    def __init__(
        self,
        settings: Settings,
        supervisor: Supervisor,
        placements: PlacementStore,
        loads: Sequence[LoadWindow],
    ) -> None:
        size = settings.num_ranks * spaced(largest_expert(settings))
        self._memory = StagingRegion(size, supervisor.register)
        region = supervisor.regions.place(self._memory.take(size)[0], size).region
        assert settings.placement.policy is not None
        self.policy: str = settings.placement.policy
        self.objective: str = settings.placement.objective
        self.is_moving = False
        self.failures = 0  # changes that had begun, and were not carried out to their end
        self._settings, self._supervisor = settings, supervisor
        self._placements, self._loads = placements, loads
        self._names = [model.name for model in settings.models]
        self._carrier = Carrier(placements, len(self._names), lambda: self._stopped, region)
        self._plans: list[PlanState | None] = [None] * len(self._names)
        self._pinned: set[int] = set()
        self._jobs: deque[tuple[Job, Future[None]]] = deque()
        self._stopped = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="expertd-placement", daemon=True)

    def start(self) -> None:
        """Begin to plan."""
        self._thread.start()

    def stop(self) -> None:
        """End after the present slice."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join()
        self._memory.close()

    def states(self) -> dict[str, PlacementState]:
        """See `Placements.states`."""
        return {name: self._state(model) for model, name in enumerate(self._names)}

    def rebalance(self, models: Sequence[str]) -> "Future[None]":
        """See `Placements.rebalance`."""
        self._supervisor.group()
        return self._add(partial(self._rebalance, [self._names.index(name) for name in models]))

    def pin(self, model: str, ranks: Sequence[Sequence[int]]) -> "Future[None]":
        """See `Placements.pin`."""
        index = self._names.index(model)
        target = pinned(self._placements.get(index), ranks)
        self._supervisor.group()
        return self._add(partial(self._pin, index, target))

    def _add(self, job: Job) -> "Future[None]":
        done: Future[None] = Future()
        with self._changed:
            if self._stopped:
                raise ExecutorClosedError("the server is shutting down")
            self._jobs.append((job, done))
            self._changed.notify_all()
        return done

    def _run(self) -> None:
        seconds = self._settings.placement.interval_seconds if self.policy == "balanced" else None
        while not self._stopped:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or bool(self._jobs), seconds)
                job, done = self._jobs.popleft() if self._jobs else (self._rebalance_loaded, None)
            if not self._stopped:
                self._do(job, done)
            elif done is not None:
                done.set_exception(ExecutorClosedError("the server is shutting down"))
        for _, done in self._jobs:
            done.set_exception(ExecutorClosedError("the server is shutting down"))

    def _do(self, job: Job, done: "Future[None] | None") -> None:
        if done is not None and not done.set_running_or_notify_cancel():
            return
        error: Exception | None = None
        try:
            job()
        except Exception as caught:
            error = caught
            refused = isinstance(error, DeviceLostError) and not self.is_moving  # nothing had begun
            if not refused and not isinstance(error, ExecutorClosedError):
                self.failures += 1
                unexpected = not isinstance(error, DeviceLostError)
                logger.error("changing the placement failed: %s", error, exc_info=unexpected)
        finally:
            self.is_moving = False
        if done is not None and error is not None:
            done.set_exception(error)
        elif done is not None:
            done.set_result(None)

    def _rebalance_loaded(self) -> None:
        """Plan for those models whose loads say something, unless a rank is missing."""
        if not all(self._supervisor.are_up()):
            return
        models = [
            model
            for model, loads in enumerate(self._loads)
            if model not in self._pinned and loads.loads().sum() >= _MIN_LOAD * len(loads.loads())
        ]
        self._rebalance(models)

    def _rebalance(self, models: Sequence[int]) -> None:
        group = self._supervisor.group()
        self._pinned -= set(models)
        left = self._settings.placement.max_moves
        for model in sorted(models, key=lambda model: -self._imbalance(model)):  # the worst has most moves
            old, loads = self._placements.get(model), self._loads[model].loads()
            if left == 0 or not loads.any():
                continue
            new = global_placement(loads, old.num_ranks, old.num_physical)
            change = plan_change(old, new, loads, max_moves=left)
            self._plans[model] = PlanState(change.before, change.after, change.moves)
            if change.worthwhile:
                left -= change.moves
                self.is_moving = True
                self._carrier.carry_out(group, model, self._settings.models[model].shape, change.placement)
                plan = self._names[model], change.moves, change.before, change.after
                logger.info("model %s: moved %d experts, max/mean of ranks from %.3f to %.3f", *plan)

    def _pin(self, model: int, target: Placement) -> None:
        group, before = self._supervisor.group(), self._carrier.moves[model]
        self.is_moving = True
        self._pinned.discard(model)  # until it is where the caller wants it
        self._carrier.carry_out(group, model, self._settings.models[model].shape, target)
        self._pinned.add(model)
        moves = self._carrier.moves[model] - before
        logger.info("model %s: pinned the placement, moved %d experts", self._names[model], moves)

    def _imbalance(self, model: int) -> float:
        return self._placements.get(model).imbalance(self._loads[model].loads())

    def _state(self, model: int) -> PlacementState:
        placement, loads = self._placements.get(model), self._loads[model].loads()
        return PlacementState(
            ranks=[placement.experts_of_rank(rank).tolist() for rank in range(placement.num_ranks)],
            are_up=self._supervisor.are_up(),
            loads=loads.tolist(),
            rank_loads=placement.load_by_rank(loads).tolist(),
            imbalance=placement.imbalance(loads),
            is_pinned=model in self._pinned,
            last_plan=self._plans[model],
            moves=self._carrier.moves[model],
            move_seconds=self._carrier.seconds[model],
        )


class SliceSize:
    """The bytes that move at once, from the time that slices took."""

    def __init__(self) -> None:
        self.num_bytes = _FIRST_BYTES

    def note(self, num_bytes: int, seconds: float) -> None:
        """Aim at half of the time that is allowed; at most twice as many bytes as before."""
        fitting = int(num_bytes * _AIMED_SECONDS / max(seconds, 1e-9))
        self.num_bytes = max(_MIN_BYTES, min(fitting, 2 * self.num_bytes))


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

        Raises DeviceLostError if a rank is lost, and ExecutorClosedError once `stopped` is true.
        """
        for each in rounds(self._placements.get(model), target):
            began = time.perf_counter()
            self._fetch(group, model, shape, each)
            for matrix in range(len(MATRICES)):  # each of them may take as long as a slice
                self._command(group, model, MoveKind.PREPARE, each, matrix)
            self._command(group, model, MoveKind.SWITCH, each)
            self._placements.set(group.generation, model, each.placement)
            self.moves[model] += len(each.fetches)
            self.seconds[model] += time.perf_counter() - began

    def _fetch(self, group: RankGroup, model: int, shape: LayerShape, each: Round) -> None:
        done = 0
        while done < shape.expert_bytes:
            end = min(done + self._slice.num_bytes, shape.expert_bytes)
            seconds = self._command(group, model, MoveKind.FETCH, each, done, end)
            self._slice.note(end - done, seconds)
            done = end

    def _command(
        self, group: RankGroup, model: int, kind: MoveKind, each: Round, start: int = 0, end: int = 0
    ) -> float:
        if self._stopped():
            raise ExecutorClosedError("the server is shutting down")
        self._last += 1
        command = MoveCommand(self._last, model, kind, each.fetches, start, end, self._region)
        return group.move(self._last, command.packed())


def pinned(present: Placement, ranks: Sequence[Sequence[int]]) -> Placement:
    """The placement with these experts on each rank, of the size of `present`.

    A rank may hold an expert twice, as plans may have it: then two shares of the expert's load are there.
    Raises PlacementRefusedError if they do not fit, or are not all of the layer's experts.
    """
    if len(ranks) != present.num_ranks:
        raise PlacementRefusedError(
            f"ranks: expected a list for each of {present.num_ranks}, got {len(ranks)}"
        )
    for rank, experts in enumerate(ranks):
        slots = present.slots_of_rank(rank)
        room = slots.stop - slots.start
        if len(experts) != room:
            expected = f"{room} experts, for which rank {rank} has memory"
            raise PlacementRefusedError(f"ranks.{rank}: expected {expected}, got {len(experts)}")
        for expert in experts:
            if not 0 <= expert < present.num_experts:
                expected = f"experts 0 to {present.num_experts - 1}"
                raise PlacementRefusedError(f"ranks.{rank}: expected {expected}, got {expert}")
    held = np.array([expert for experts in ranks for expert in experts])
    missing = np.setdiff1d(np.arange(present.num_experts), held)
    if missing.size:
        expected = f"each of {present.num_experts} experts on a rank"
        raise PlacementRefusedError(f"ranks: expected {expected}, got none with expert {missing[0]}")
    return Placement(held, present.num_experts, present.num_ranks)
