"""From one placement to another: how many experts move, and which changes are worth it."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from expertd.service.moe.placement.placement import Floats, Ints, Placement, checked_loads, require
from expertd.service.moe.placement.search import Search
from expertd.service.moe.split import parts_of

# A layer whose max/mean would fall by less stays as it is.
MIN_GAIN = 0.05


@dataclass(frozen=True, eq=False)
class Change:
    """A placement to go over to.

    moves   experts that some rank must fetch
    before  max/mean with the old placement
    after   the same with the new one
    """

    placement: Placement
    moves: int
    before: float
    after: float

    @property
    def worthwhile(self) -> bool:
        """Whether it gains at least 5%; else it is none."""
        return self.moves > 0


def count_moves(old: Placement, new: Placement) -> int:
    """Physical experts whose rank did not hold their expert before."""
    require_alike(old, new)
    return int((~_held(old)[old.rank_of_slot(), new.physical_to_logical]).sum())


def relabel(old: Placement, new: Placement) -> Placement:
    """`new` with its ranks renumbered so that as few experts move as possible.

    Experts that stay on a rank keep their slot. The loads of the ranks are the same, in another order.
    Raises ValueError (name, expected, got).
    """
    require_alike(old, new)
    parts = parts_of(old.num_physical, old.num_ranks)
    comes = np.zeros((old.num_ranks, old.num_experts), np.int64)
    np.add.at(comes, (new.rank_of_slot(), new.physical_to_logical), 1)
    kept = _held(old).astype(np.int64) @ comes.T  # of each old rank, by the new rank in its place
    # Ranks with more slots cannot take the place of ranks with fewer.
    sizes = np.array([len(part) for part in parts])
    chosen = _assign(np.where(sizes[:, None] == sizes, -kept, old.num_physical))
    order = np.concatenate([np.array(parts[rank], np.int64) for rank in chosen])
    return keep_slots(old, replace(new, physical_to_logical=new.physical_to_logical[order]))


def keep_slots(old: Placement, new: Placement) -> Placement:
    """`new`, in which the experts that stay on a rank keep their slots. Raises ValueError."""
    require_alike(old, new)
    held = new.physical_to_logical.copy()
    for part in parts_of(old.num_physical, old.num_ranks):
        coming = held[part].tolist()
        placed: list[int | None] = [None] * len(part)
        for slot, expert in enumerate(old.physical_to_logical[part].tolist()):
            if expert in coming:
                coming.remove(expert)
                placed[slot] = expert
        held[part] = [coming.pop(0) if expert is None else expert for expert in placed]
    return replace(new, physical_to_logical=held)


def plan_change(old: Placement, new: Placement, loads: ArrayLike, *, max_moves: int | None = None) -> Change:
    """How to go from `old` to `new`, or part of the way: at most `max_moves` experts move.

    loads  [num_experts], those that `new` was made for

    Nothing changes if max/mean would fall by less than 5%. If more experts would move than `max_moves`
    allows, `new` is left aside, and `old` is improved by the moves that gain most, one after another.
    Raises ValueError (name, expected, got).
    """
    require("max_moves", max_moves is None or max_moves >= 0, "at least 0", max_moves)
    checked = checked_loads(loads)
    before = old.imbalance(checked)
    change = _worthwhile(old, relabel(old, new), checked, before)
    if max_moves is None or change.moves <= max_moves:
        return change
    search = Search(old.physical_to_logical.copy(), old.rank_of_slot(), checked / (checked.max() or 1.0))
    search.improve(max_moves)
    return _worthwhile(old, replace(old, physical_to_logical=search.slots), checked, before)


def require_alike(old: Placement, new: Placement) -> None:
    """Raises ValueError unless both are of one layer and as many ranks and physical experts."""
    for name in ("num_experts", "num_ranks", "num_physical"):
        require(name, getattr(old, name) == getattr(new, name), f"{getattr(old, name)}", getattr(new, name))


def _worthwhile(old: Placement, new: Placement, loads: Floats, before: float) -> Change:
    after = new.imbalance(loads)
    if after > before * (1 - MIN_GAIN):
        return Change(old, 0, before, before)
    return Change(new, count_moves(old, new), before, after)


def _held(placement: Placement) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Whether each rank holds each expert, bool [num_ranks, num_experts]."""
    held = np.zeros((placement.num_ranks, placement.num_experts), np.bool_)
    held[placement.rank_of_slot(), placement.physical_to_logical] = True
    return held


def _assign(cost: Ints) -> Ints:
    """The column of each row, all different, of least total cost.

    The Hungarian method: shortest augmenting paths with prices.
    """
    size, far = len(cost), np.iinfo(np.int64).max
    column_of, row_of = np.full(size, -1), np.full(size, -1)
    row_price, column_price = cost.min(axis=1), np.zeros(size, dtype=np.int64)
    for start in range(size):
        distance = np.full(size, far)
        open_distance = distance.copy()  # `far` also where a column is done
        previous = np.zeros(size, dtype=np.int64)
        done = np.zeros(size, dtype=np.bool_)
        row, length, rows = start, 0, [start]
        while row >= 0:
            through = length + cost[row] - row_price[row] - column_price
            shorter = (through < open_distance) & ~done
            open_distance[shorter] = distance[shorter] = through[shorter]
            previous[shorter] = row
            column = int(open_distance.argmin())
            length = int(distance[column])
            done[column], open_distance[column] = True, far
            row = int(row_of[column])
            rows.append(row)
        # Prices rise by what each row or column on the way lies below the path's length.
        column_price[done] += distance[done] - length
        row_price[start] += length
        matched = np.array(rows[1:-1], dtype=np.int64)
        row_price[matched] += length - distance[column_of[matched]]
        while row != start:
            row = int(previous[column])
            row_of[column] = row
            column_of[row], column = column, int(column_of[row])
    return column_of
