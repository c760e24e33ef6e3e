"""From one placement to another: how many experts move, and which changes are worth it."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from expertd.service.moe.placement.bounded import improve
from expertd.service.moe.placement.checks import checked_loads, require
from expertd.service.moe.placement.labels import keep_slots, match
from expertd.service.moe.placement.packing import slot_mask, spread_slots
from expertd.service.moe.placement.placement import Placement, rank_slots

# A layer whose max/mean would fall by less stays as it is.
LEAST_GAIN = 0.05


@dataclass(frozen=True, eq=False)
class Change:
    """A placement to go over to.

    moves   experts that some rank must fetch, over all layers
    before  max/mean of each layer with the old placement, float64 [num_layers]
    after   the same with the new one
    """

    placement: Placement
    moves: int
    before: NDArray[np.float64]
    after: NDArray[np.float64]

    @property
    def worthwhile(self) -> bool:
        """Whether any layer changes; all that do gain at least 5%."""
        return self.moves > 0


def count_moves(old: Placement, new: Placement) -> int:
    """Physical experts, over all layers, whose rank did not hold their expert before."""
    return int(_moved(old, new).sum())


def relabel(old: Placement, new: Placement, *, num_nodes: int = 1) -> Placement:
    """`new` with its ranks renumbered, layer by layer, so that as few experts move as possible.

    Nodes are renumbered as a whole, before the ranks of each, so that the groups of a node stay together.
    Experts that stay on a rank keep their slot. The loads of the ranks are the same, in another order.
    Raises ValueError (name, expected, got).
    """
    _require_alike(old, new)
    num_ranks = old.num_ranks
    require(
        "num_nodes", num_nodes >= 1 and num_ranks % num_nodes == 0, f"a divisor of {num_ranks}", num_nodes
    )
    capacity = rank_slots(old.num_physical, num_ranks)
    uneven = num_nodes > 1 and old.num_physical % num_ranks
    require("num_nodes", not uneven, "1 where ranks hold different numbers", num_nodes)
    before = spread_slots(old.physical_to_logical, capacity)
    after = spread_slots(new.physical_to_logical, capacity)
    if num_nodes > 1:
        shape = (old.num_layers, num_nodes, -1)
        chosen = match(_kept(before.reshape(shape), after.reshape(shape), old.num_experts))
        after = np.take_along_axis(after.reshape(shape), chosen[:, :, None], axis=1).reshape(after.shape)
    shape = (old.num_layers * num_nodes, num_ranks // num_nodes, -1)
    before, after = before.reshape(shape), after.reshape(shape)
    kept = _kept(before, after, old.num_experts)
    if num_nodes == 1:
        # Ranks with more slots cannot take the place of ranks with fewer.
        kept = np.where(capacity[:, None] == capacity, kept, -before.size)
    after = np.take_along_axis(after, match(kept)[:, :, None], axis=1)
    slots = keep_slots(before, after).reshape(old.num_layers, num_ranks, -1)
    return replace(new, physical_to_logical=slots[:, slot_mask(capacity)])


def plan_change(
    old: Placement, new: Placement, loads: ArrayLike, *, max_moves: int | None = None, num_nodes: int = 1
) -> Change:
    """How to go from `old` to `new`, or part of the way: at most `max_moves` experts move, over all layers.

    loads  [num_layers, num_experts], those that `new` was made for

    Layers whose max/mean would fall by less than 5% keep their old placement. If more experts would move
    than `max_moves` allows, `new` is left aside, and `old` is improved by the moves that gain most, one after
    another, each within a node. Raises ValueError (name, expected, got).
    """
    require("max_moves", max_moves is None or max_moves >= 0, "at least 0", max_moves)
    checked = checked_loads(loads)
    before = old.imbalance(checked)
    change = _worthwhile(old, relabel(old, new, num_nodes=num_nodes), checked, before)
    if max_moves is None or change.moves <= max_moves:
        return change
    gaining = np.flatnonzero(change.after < before)
    together, moves = improve(old, checked, gaining, max_moves, num_nodes)
    change = _worthwhile(old, together, checked, before)
    # Moves of layers that gained too little are left: each of these layers tries them alone.
    alone = gaining[change.after[gaining] == before[gaining]] if moves == max_moves else gaining[:0]
    for layer in alone[np.argsort(-before[alone], kind="stable")]:
        left = max_moves - change.moves
        improved, _ = improve(change.placement, checked, np.array([layer]), left, num_nodes)
        change = _worthwhile(old, improved, checked, before)
    return change


def _worthwhile(
    old: Placement, new: Placement, loads: NDArray[np.float64], before: NDArray[np.float64]
) -> Change:
    """The change to `new` in those layers that gain enough."""
    gains = new.imbalance(loads) <= before * (1 - LEAST_GAIN)
    slots = np.where(gains[:, None], new.physical_to_logical, old.physical_to_logical)
    placement = replace(new, physical_to_logical=slots)
    return Change(placement, count_moves(old, placement), before, placement.imbalance(loads))


def _require_alike(old: Placement, new: Placement) -> None:
    for name in ("num_layers", "num_experts", "num_ranks", "num_physical"):
        require(name, getattr(old, name) == getattr(new, name), f"{getattr(old, name)}", getattr(new, name))


def _moved(old: Placement, new: Placement) -> NDArray[np.bool_]:
    """Which physical experts of `new` their rank must fetch, bool [num_layers, num_physical]."""
    _require_alike(old, new)
    layers, ranks = np.arange(old.num_layers)[:, None], old.rank_of_slot()
    held = np.zeros((old.num_layers, old.num_ranks, old.num_experts), dtype=np.bool_)
    held[layers, ranks, old.physical_to_logical] = True
    moved: NDArray[np.bool_] = ~held[layers, ranks, new.physical_to_logical]
    return moved


def _kept(before: NDArray[np.int64], after: NDArray[np.int64], num_experts: int) -> NDArray[np.int64]:
    """Experts that stay if a part of `after` takes the place of one of `before`: [rows, before, after]."""
    rows, parts, _ = before.shape
    held = np.zeros((rows, parts, num_experts + 1), dtype=np.float32)  # the last: no slot
    held[np.arange(rows)[:, None, None], np.arange(parts)[:, None], before] = 1
    comes = np.zeros_like(held)
    np.add.at(comes, (np.arange(rows)[:, None, None], np.arange(parts)[:, None], after), 1)
    return (held @ comes.transpose(0, 2, 1)).astype(np.int64)
