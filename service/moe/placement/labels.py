"""Numbering the ranks of a new placement so that it resembles the old one."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def match(kept: Ints) -> Ints:
    """For each old part the new part that takes its place, int64 [rows, parts]: a permutation in each row.

    kept  int64 [rows, old parts, new parts], experts that stay if the new part takes the old one's place

    The best pair first, then exchanges of two while more stays.
    """
    rows, parts, _ = kept.shape
    each = np.arange(rows)
    chosen = np.zeros((rows, parts), dtype=np.int64)
    left = kept.astype(np.float64)
    for _ in range(parts):
        old, new = np.divmod(left.reshape(rows, -1).argmax(axis=1), parts)
        chosen[each, old] = new
        left[each, old] = -np.inf
        left[each, :, new] = -np.inf
    _exchange_pairs(kept, chosen)
    return chosen


def _exchange_pairs(kept: Ints, chosen: Ints) -> None:
    """Exchange two parts of each row at a time, in place, while more stays: ends, as each exchange gains."""
    rows, parts = chosen.shape
    pending = np.arange(rows)
    while len(pending):
        each = np.arange(len(pending))
        # [rows, i, j]: what stays if old part i gets the new part of j.
        stays = np.take_along_axis(kept[pending], chosen[pending][:, None, :], axis=2)
        now = np.diagonal(stays, axis1=1, axis2=2)
        gain = stays + stays.transpose(0, 2, 1) - now[:, :, None] - now[:, None, :]
        i, j = np.divmod(gain.reshape(len(pending), -1).argmax(axis=1), parts)
        gains = gain[each, i, j] > 0
        pending, i, j = pending[gains], i[gains], j[gains]
        chosen[pending, i], chosen[pending, j] = chosen[pending, j], chosen[pending, i]


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
