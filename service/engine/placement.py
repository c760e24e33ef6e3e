"""What the engine and HTTP know of placements; `expertd.service.ranks.front.balancer` implements it."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class PlanState(NamedTuple):
    """A layer's last plan: max/mean before it and as planned, and experts to move, 0: too little gain."""

    before: float
    after: float
    moves: int


@dataclass(frozen=True, slots=True)
class PlacementState:
    """A layer's placement at present.

    ranks        the experts that each rank holds, or will hold when it has started again
    are_up       whether each rank runs steps
    loads        of each expert, lately: tokens, or steps in which it was activated
    rank_loads   of each rank, if the replicas that are there share their expert's load equally
    imbalance    max/mean of the loads of the ranks that are there
    is_pinned    whether it was given by a caller, and no plan changes it
    last_plan    None: there was none yet
    moves        experts that have moved so far, and `move_seconds`, the time that this took
    """

    ranks: Sequence[Sequence[int]]
    are_up: Sequence[bool]
    loads: Sequence[float]
    rank_loads: Sequence[float]
    imbalance: float
    is_pinned: bool
    last_plan: PlanState | None
    moves: int
    move_seconds: float


class Placements(Protocol):
    """The placements of all layers that ranks hold. Safe from any thread."""

    @property
    def policy(self) -> str: ...
    @property
    def objective(self) -> str: ...
    @property
    def is_moving(self) -> bool: ...
    @property
    def failures(self) -> int: ...

    def states(self) -> dict[str, PlacementState]:
        """The placement of each model."""

    def rebalance(self, models: Sequence[str]) -> "Future[None]":
        """Plan anew from the loads of these models, also pinned ones; done once all has moved.

        Fails with DeviceLostError if a rank is lost, and ExecutorClosedError at shutdown. Raises
        DeviceLostError while a rank is missing.
        """

    def pin(self, model: str, ranks: Sequence[Sequence[int]]) -> "Future[None]":
        """Give each rank these experts. Raises and fails as `rebalance`; raises PlacementRefusedError."""
