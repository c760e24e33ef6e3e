"""A placement: which physical expert is a replica of which expert, and on which rank it is."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from expertd.service.moe.split import part_of, parts_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Placement:
    """The experts of every rank. Arrays are read-only int64.

    physical_to_logical  [num_physical], the expert of each physical expert, rank after rank; the first
                         num_physical % num_ranks ranks hold one more than the others
    num_replicas         [num_experts], replicas of each expert, at least 1

    Raises ValueError (name, expected, got) for experts that do not exist, and experts without a replica.
    """

    physical_to_logical: Ints
    num_experts: int
    num_ranks: int
    num_replicas: Ints = field(init=False)

    def __post_init__(self) -> None:
        held = np.array(self.physical_to_logical)
        name, num_experts = "physical_to_logical", self.num_experts
        integers = held.ndim == 1 and held.dtype.kind in "iu" and held.size > 0
        require(name, integers, "integers [num_physical]", f"{held.dtype} {list(held.shape)}")
        require("num_experts", num_experts >= 1, "at least 1", num_experts)
        require("num_ranks", self.num_ranks >= 1, "at least 1", self.num_ranks)
        known = held.min() >= 0 and held.max() < num_experts
        require(name, known, f"experts 0 to {num_experts - 1}", f"{held.min()} to {held.max()}")
        held = held.astype(np.int64)
        counts = np.bincount(held, minlength=num_experts)
        require(name, bool(counts.all()), "every expert", f"no expert {counts.argmin()}")
        for given, value in (("physical_to_logical", held), ("num_replicas", counts)):
            value.setflags(write=False)
            object.__setattr__(self, given, value)

    @property
    def num_physical(self) -> int:
        """Physical experts, on all ranks together."""
        return len(self.physical_to_logical)

    def slots_of_rank(self, rank: int) -> slice:
        """A rank's physical experts."""
        require("rank", 0 <= rank < self.num_ranks, f"0 to {self.num_ranks - 1}", rank)
        part = part_of(self.num_physical, rank, self.num_ranks)
        return slice(part.start, part.stop)

    def experts_of_rank(self, rank: int) -> Ints:
        """The experts that a rank holds, int64 [slots], in the order of its physical experts."""
        return self.physical_to_logical[self.slots_of_rank(rank)]

    def rank_of_slot(self) -> Ints:
        """The rank of each physical expert, int64 [num_physical]."""
        parts = parts_of(self.num_physical, self.num_ranks)
        return np.repeat(np.arange(self.num_ranks), [len(part) for part in parts])

    def load_by_rank(self, loads: ArrayLike) -> Floats:
        """Each rank's load, float64 [num_ranks], if an expert's replicas share its load equally.

        loads  [num_experts], in any unit
        """
        checked = checked_loads(loads)
        require("loads", len(checked) == self.num_experts, f"[{self.num_experts}]", list(checked.shape))
        shares = (checked / self.num_replicas)[self.physical_to_logical]
        by_rank: Floats = np.bincount(self.rank_of_slot(), shares, self.num_ranks).astype(np.float64)
        return by_rank

    def imbalance(self, loads: ArrayLike) -> float:
        """max/mean of the ranks' loads: 1 is perfect balance, also without any load."""
        checked = checked_loads(loads)
        # Relative to the largest expert's, sums of huge loads stay finite.
        by_rank = self.load_by_rank(checked / (checked.max() or 1.0))
        return float(by_rank.max() / by_rank.mean()) if by_rank.any() else 1.0


def contiguous_placement(num_experts: int, num_ranks: int, num_physical: int | None = None) -> Placement:
    """The static placement: experts in order; the first num_experts % num_ranks ranks have one more.

    num_physical  at least num_experts, which it is if None; a rank's spare slots get the experts that follow
                  its own
    Raises ValueError (name, expected, got).
    """
    total = num_experts if num_physical is None else num_physical
    require("num_experts", num_experts >= 1, "at least 1", num_experts)
    require("num_ranks", num_ranks >= 1, "at least 1", num_ranks)
    require_room(total, num_experts)
    parts = zip(parts_of(num_experts, num_ranks), parts_of(total, num_ranks), strict=True)
    held = [np.arange(own.start, own.start + len(slots)) % num_experts for own, slots in parts]
    return Placement(np.concatenate(held), num_experts, num_ranks)


def require(name: str, holds: bool, expected: str, got: object) -> None:
    """Raises ValueError unless `holds`."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def require_room(num_physical: int, num_experts: int) -> None:
    """Raises ValueError unless every expert has a replica."""
    require(
        "num_physical", num_physical >= num_experts, f"at least num_experts ({num_experts})", num_physical
    )


def checked_loads(loads: ArrayLike) -> Floats:
    """Loads as float64 [num_experts]: finite, not negative, at least one. Raises ValueError."""
    try:
        checked = np.asarray(loads, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"loads: expected numbers [num_experts], got {loads!r:.80}") from None
    require("loads", checked.ndim == 1 and checked.size > 0, "[num_experts]", list(checked.shape))
    wrong = np.flatnonzero(~(np.isfinite(checked) & (checked >= 0)))
    if len(wrong):
        got = f"{checked[wrong[0]]} at [{wrong[0]}]"
        raise ValueError(f"loads: expected finite numbers, not negative, got {got}")
    return checked
