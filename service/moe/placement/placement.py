"""A placement: which physical expert is a replica of which expert, and on which rank it is."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from expertd.service.moe.placement.checks import checked_loads, described, require
from expertd.service.moe.split import part_of


@dataclass(frozen=True, eq=False)
class Placement:
    """The experts of every rank, for each layer. All arrays are read-only int64.

    physical_to_logical  [num_layers, num_physical], the expert of each physical expert, rank after rank; the
                         first num_physical % num_ranks ranks hold one more than the others
    logical_to_physical  [num_layers, num_experts, max_replicas], each expert's replicas, rising, then -1
    num_replicas         [num_layers, num_experts], replicas of each expert, at least 1

    Raises ValueError (name, expected, got) for experts that do not exist, and experts without a replica.
    """

    physical_to_logical: NDArray[np.int64]
    num_experts: int
    num_ranks: int
    logical_to_physical: NDArray[np.int64] = field(init=False)
    num_replicas: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        held = np.array(self.physical_to_logical)
        name, num_experts = "physical_to_logical", self.num_experts
        integers = held.ndim == 2 and held.dtype.kind in "iu"
        require(name, integers and held.size > 0, "integers [num_layers, num_physical]", described(held))
        require("num_experts", num_experts >= 1, "at least 1", num_experts)
        require("num_ranks", self.num_ranks >= 1, "at least 1", self.num_ranks)
        known = held.min() >= 0 and held.max() < num_experts
        require(name, known, f"experts 0 to {num_experts - 1}", f"{held.min()} to {held.max()}")
        held = held.astype(np.int64)
        num_layers = len(held)
        which = held + np.arange(num_layers)[:, None] * num_experts
        counts = np.bincount(which.ravel(), minlength=num_layers * num_experts).reshape(num_layers, -1)
        if not counts.all():
            layer, expert = (int(i) for i in np.argwhere(counts == 0)[0])
            raise ValueError(f"{name}: expected every expert, got no expert {expert} in layer {layer}")
        # Physical experts in the order of their experts: each expert's replicas follow each other.
        order = np.argsort(
            held.astype(np.uint16 if num_experts <= 1 << 16 else np.int64), axis=1, kind="stable"
        )
        replicas = np.full((num_layers, num_experts, int(counts.max())), -1, dtype=np.int64)
        replicas[np.arange(replicas.shape[2]) < counts[:, :, None]] = order.ravel()
        for given, value in (
            ("physical_to_logical", held),
            ("logical_to_physical", replicas),
            ("num_replicas", counts),
        ):
            value.setflags(write=False)
            object.__setattr__(self, given, value)

    @property
    def num_layers(self) -> int:
        return len(self.physical_to_logical)

    @property
    def num_physical(self) -> int:
        """Physical experts of a layer, on all ranks together."""
        return int(self.physical_to_logical.shape[1])

    def slots_of_rank(self, rank: int) -> slice:
        """A rank's physical experts, the same in every layer."""
        require("rank", 0 <= rank < self.num_ranks, f"0 to {self.num_ranks - 1}", rank)
        part = part_of(self.num_physical, rank, self.num_ranks)
        return slice(part.start, part.stop)

    def experts_of_rank(self, layer: int, rank: int) -> NDArray[np.int64]:
        """The experts that a rank holds, int64 [slots], in the order of its physical experts."""
        require("layer", 0 <= layer < self.num_layers, f"0 to {self.num_layers - 1}", layer)
        return self.physical_to_logical[layer, self.slots_of_rank(rank)]

    def rank_of_slot(self) -> NDArray[np.int64]:
        """The rank of each physical expert, int64 [num_physical]."""
        return np.repeat(np.arange(self.num_ranks), rank_slots(self.num_physical, self.num_ranks))

    def load_by_rank(self, loads: ArrayLike) -> NDArray[np.float64]:
        """Each rank's load, float64 [num_layers, num_ranks], if an expert's replicas share its load equally.

        loads  [num_layers, num_experts], in any unit
        """
        checked = checked_loads(loads)
        expected = [self.num_layers, self.num_experts]
        require("loads", list(checked.shape) == expected, f"{expected}", list(checked.shape))
        shares = np.take_along_axis(checked / self.num_replicas, self.physical_to_logical, axis=1)
        return np.stack([shares[:, self.slots_of_rank(r)].sum(axis=1) for r in range(self.num_ranks)], axis=1)

    def imbalance(self, loads: ArrayLike) -> NDArray[np.float64]:
        """max/mean of the ranks' loads, float64 [num_layers]: 1 is perfect balance, also without any load."""
        checked = checked_loads(loads)
        largest = checked.max(axis=1, keepdims=True)
        # Relative to the largest expert's, sums of huge loads stay finite.
        relative = np.divide(checked, largest, out=np.ones_like(checked), where=largest > 0)
        by_rank = self.load_by_rank(relative)
        ratio: NDArray[np.float64] = by_rank.max(axis=1) / by_rank.mean(axis=1)
        return np.where(largest[:, 0] > 0, ratio, 1.0)


def rank_slots(num_physical: int, num_ranks: int) -> NDArray[np.int64]:
    """Physical experts of each rank, int64 [num_ranks]: even, or the first ranks have one more."""
    require("num_ranks", num_ranks >= 1, "at least 1", num_ranks)
    return np.array([len(part_of(num_physical, rank, num_ranks)) for rank in range(num_ranks)], np.int64)


def contiguous_placement(
    num_layers: int, num_experts: int, num_ranks: int, num_physical: int | None = None
) -> Placement:
    """The static placement: experts in order; the first num_experts % num_ranks ranks have one more.

    num_physical  physical experts of a layer, at least num_experts, which it is if None; a rank's spare slots
                  get the experts that follow its own
    Raises ValueError (name, expected, got).
    """
    require("num_layers", num_layers >= 1, "at least 1", num_layers)
    require("num_experts", num_experts >= 1, "at least 1", num_experts)
    total = num_experts if num_physical is None else num_physical
    require("num_physical", total >= num_experts, f"at least num_experts ({num_experts})", total)
    own, capacity = rank_slots(num_experts, num_ranks), rank_slots(total, num_ranks)
    first = np.repeat(np.cumsum(own) - own, capacity)
    slot = np.arange(total) - np.repeat(np.cumsum(capacity) - capacity, capacity)
    return Placement(np.tile((first + slot) % num_experts, (num_layers, 1)), num_experts, num_ranks)
