"""Numbering the ranks of a new placement so that it resembles the old one."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
FAR = np.iinfo(np.int64).max


def match(kept: Ints) -> Ints:
    """For each old part the new part that takes its place, int64 [rows, parts]: a permutation in each row.

    kept  int64 [rows, old parts, new parts], experts that stay if the new part takes the old one's place

    As many as possible stay, over all parts of a row.
    """
    return np.stack([_assign(-row) for row in kept])


def _assign(cost: Ints) -> Ints:
    """The permutation of least total cost, by the Hungarian method: shortest augmenting paths with prices."""
    parts = len(cost)
    column_of = np.full(parts, -1, dtype=np.int64)
    row_of = np.full(parts, -1, dtype=np.int64)
    row_price, column_price = cost.min(axis=1), np.zeros(parts, dtype=np.int64)
    for start in range(parts):
        distance = np.full(parts, FAR)
        open_distance = distance.copy()  # FAR also where a column is done
        previous = np.zeros(parts, dtype=np.int64)
        done = np.zeros(parts, dtype=np.bool_)
        row, length, rows = start, 0, [start]
        while row >= 0:
            through = length + cost[row] - row_price[row] - column_price
            shorter = (through < open_distance) & ~done
            open_distance[shorter] = distance[shorter] = through[shorter]
            previous[shorter] = row
            column = int(open_distance.argmin())
            length = int(distance[column])
            done[column], open_distance[column] = True, FAR
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


def keep_slots(before: Ints, after: Ints) -> Ints:
    """`after` [rows, ranks, slots] with the experts of each rank in the slots that they had `before`."""
    placed = np.full_like(after, -2)
    used = np.zeros(after.shape, dtype=np.bool_)
    num_slots = after.shape[2]
    for slot in range(num_slots):
        same = (after == before[:, :, slot, None]) & ~used
        row, rank = np.nonzero(same.any(axis=2))
        at = same[row, rank].argmax(axis=1)
        placed[row, rank, slot] = after[row, rank, at]
        used[row, rank, at] = True
    # The others fill the free slots in their order.
    free = placed == -2
    placed[free] = after[~used]
    return placed
