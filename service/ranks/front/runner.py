"""The runner of the front end: it sends a model's steps to the ranks, and has no device."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace

import numpy as np
from numpy.typing import NDArray

from expertd.service.engine.metrics.ranks import RankState
from expertd.service.moe.request import LayerRequest, StepResult
from expertd.service.moe.routing_checks import check_routing
from expertd.service.moe.step.step_counts import NOTHING, StepUse, StoreCounts
from expertd.service.ranks.front.group import RankGroup
from expertd.service.ranks.front.staging import StagedStep, StagingRegion
from expertd.service.ranks.front.supervisor import Supervisor
from expertd.service.ranks.messages import StepEnd
from expertd.service.ranks.placement import LoadWindow
from expertd.service.settings.served import ModelSettings


class Steps:
    """What the runners of all models share: the ranks, how many steps were sent, memory for `MAX_SENT`."""

    def __init__(self, supervisor: Supervisor, staging: Sequence[StagingRegion], num_ranks: int) -> None:
        self.supervisor = supervisor
        self._free = list(staging)
        self._seconds = [0.0] * num_ranks
        self._expert_tokens = [0] * num_ranks
        self._stores: dict[str, StoreCounts] = {}  # of all ranks, by model
        self._stores_of_ranks: list[StoreCounts | None] = [None] * num_ranks
        self.sent = 0  # over all groups of ranks: the number of the last step
        self._lock = threading.Lock()

    def note(self, model: str, ends: Mapping[int, StepEnd]) -> None:
        """Count the ends of a model's step, by rank."""
        for rank, end in ends.items():
            self._seconds[rank] += end.seconds
            self._expert_tokens[rank] += int(end.tokens_per_expert.sum())
            if any(astuple(end.store)):
                self._stores.setdefault(model, StoreCounts()).add(end.store)
                of_rank = self._stores_of_ranks[rank] = self._stores_of_ranks[rank] or StoreCounts()
                of_rank.add(end.store)

    def use(self) -> StepUse:
        """What the ranks' stores have done; on any thread."""
        return replace(NOTHING, stores=dict(self._stores))

    def states(self) -> list[RankState]:
        """Each rank's state."""
        ranks = self.supervisor
        of_ranks = ranks.are_up(), ranks.starts, self._seconds, self._expert_tokens, ranks.devices()
        return [RankState(*of_rank) for of_rank in zip(*of_ranks, self._stores_of_ranks, strict=True)]

    def take(self) -> StagingRegion:
        """Memory for a step; to give back at its end."""
        with self._lock:
            return self._free.pop()

    def give_back(self, staging: StagingRegion) -> None:
        """A step has ended."""
        with self._lock:
            self._free.append(staging)


class RankRunner:
    """Begins steps of one model; see `Runner`. `index` is the model's place in the settings."""

    def __init__(
        self, steps: Steps, index: int, model: ModelSettings, loads: LoadWindow | None = None
    ) -> None:
        self._steps, self._index, self._model = steps, index, model
        self._loads = loads

    def validate(self, request: LayerRequest) -> None:
        """Raise ValueError (name, expected, got) for invalid routing."""
        check_routing(request, self._model.num_experts, self._model.top_k)

    def begin(self, requests: Sequence[LayerRequest]) -> "RankStep":
        """Send a step to all ranks, which have fewer than `MAX_SENT`. Raises DeviceLostError."""
        steps = self._steps
        group = steps.supervisor.group()
        staging, number = steps.take(), steps.sent + 1
        try:
            staged = StagedStep(requests, self._model.hidden_size, staging, steps.supervisor.regions)
            group.begin(number, staged.command(number, self._index))
        except BaseException:
            steps.give_back(staging)
            raise
        steps.sent = number  # no gaps: a rank of another node chooses a step's memory by its number
        return RankStep(steps, self._model.name, group, number, staged, staging, self._loads)


class RankStep:
    """A step on all ranks; see `expertd.service.engine.steps.Step`."""

    def __init__(
        self,
        steps: Steps,
        model: str,
        group: RankGroup,
        number: int,
        staged: StagedStep,
        staging: StagingRegion,
        loads: LoadWindow | None,
    ) -> None:
        self._loads, self._model = loads, model
        self._steps, self._group, self._number = steps, group, number
        self._staged, self._staging = staged, staging
        self._ends: dict[int, StepEnd] | None = None
        self._result: StepResult | None = None

    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._ends is not None or self._group.is_done(self._number)

    def wait(self) -> float:
        """Wait for the outputs; the seconds that the slowest rank took.

        Raises DeviceLostError if a rank is lost, RuntimeError if the step failed.
        """
        return max(end.seconds for end in self._wait().values())

    def finish(self) -> StepResult:
        """Wait for the result, and count the step. Raises as `wait` does."""
        ends = self._wait()
        if self._result is None:
            self._result = self._made(list(ends.values()))
            self._steps.note(self._model, ends)
            if self._loads is not None:
                self._loads.note([end.tokens_per_expert for end in ends.values()])
        return self._result

    def _wait(self) -> dict[int, StepEnd]:
        if self._ends is None:
            try:
                self._ends = self._group.wait(self._number)
            finally:
                self._steps.give_back(self._staging)  # outputs there are read before another step begins
        return self._ends

    def _made(self, ends: Sequence[StepEnd]) -> StepResult:
        def count() -> NDArray[np.int64]:
            counts: NDArray[np.int64] = np.sum([end.tokens_per_expert for end in ends], axis=0)
            return counts

        return StepResult(
            outputs=list(self._staged.outputs()),
            layout=ends[0].layout,
            num_tokens=self._staged.num_tokens,
            count_tokens=count,
            compute_seconds=max(end.seconds for end in ends),
            empty_slots=sum(end.empty_slots for end in ends),
        )
