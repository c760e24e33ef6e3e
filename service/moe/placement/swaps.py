"""Exchanges of replicas between ranks after packing: no expert twice on a rank, lower largest loads."""

import numpy as np
from numpy.typing import NDArray

from expertd.service.moe.placement.packing import Floats, Ints, slot_loads

# Each turn exchanges one pair in each row; the heaviest rank's partner is one of the lightest, in turn.
MAX_TURNS = 16
PARTNERS = 4
# An exchange must gain more than rounding: this part of the difference of the two loads.
LEAST_GAIN = 1e-6


def level(slots: Ints, per_replica: Floats, enough: Floats) -> None:
    """Exchange replicas of the most loaded rank with a light rank's, in place, while that lowers its load.

    slots        int64 [rows, ranks, slots], experts, -1 for no slot
    per_replica  float64 [rows, experts]
    enough       float64 [rows], the largest load at which a row is left as it is

    No exchange raises a row's largest load, or brings an expert to a rank that holds it already.
    """
    weights = slot_loads(per_replica, slots)
    load = weights.sum(axis=2)
    partners = min(PARTNERS, slots.shape[1])
    idle = np.zeros(len(slots), dtype=np.int64)
    for turn in range(MAX_TURNS):
        rows = np.flatnonzero((load.max(axis=1) > enough) & (idle < partners))
        if not len(rows):
            return
        loads = load[rows]
        heavy = loads.argmax(axis=1)
        light = np.argsort(loads, axis=1)[:, turn % partners]
        gap = loads[np.arange(len(rows)), heavy] - loads[np.arange(len(rows)), light]
        a, b, gain = _best_exchange(slots, weights, rows, heavy, light, gap)
        gains = gain > LEAST_GAIN * gap
        idle[rows] = np.where(gains, 0, idle[rows] + 1)
        _exchange(slots, weights, load, rows[gains], heavy[gains], a[gains], light[gains], b[gains])


def _best_exchange(
    slots: Ints, weights: Floats, rows: Ints, heavy: Ints, light: Ints, gap: Floats
) -> tuple[Ints, Ints, Floats]:
    """Each row's best pair of slots of two ranks, and by how much it lowers the larger load of the two."""
    given, taken = slots[rows, heavy], slots[rows, light]
    same = given[:, :, None] == taken[:, None, :]
    # An expert that the other rank holds stays, and so does a slot that does not exist.
    stays_a = same.any(axis=2) | (given < 0)
    stays_b = same.any(axis=1) | (taken < 0)
    out = np.where(stays_a, -np.inf, weights[rows, heavy])
    back = np.where(stays_b, np.inf, weights[rows, light])
    # Half of the gap would make both loads equal; more than all of it would exchange their roles.
    miss = np.abs(out[:, :, None] - back[:, None, :] - gap[:, None, None] / 2).reshape(len(rows), -1)
    best = miss.argmin(axis=1)
    a, b = np.divmod(best, slots.shape[2])
    return a, b, gap / 2 - miss[np.arange(len(rows)), best]


def _exchange(
    slots: Ints, weights: Floats, load: Floats, rows: Ints, rank: Ints, a: Ints, other: Ints, b: Ints
) -> None:
    """Exchange slot `a` of `rank` with slot `b` of `other` in each of `rows`, in place."""
    moved = weights[rows, rank, a] - weights[rows, other, b]
    for values in (slots, weights):
        kept = values[rows, rank, a]
        values[rows, rank, a] = values[rows, other, b]
        values[rows, other, b] = kept
    load[rows, rank] -= moved
    load[rows, other] += moved


def separate(slots: Ints, per_replica: Floats) -> None:
    """Exchange replicas in place until no rank holds an expert twice, where single exchanges can do that.

    Each goes where the larger load of the two ranks is least then.
    """
    weights = slot_loads(per_replica, slots)
    load = weights.sum(axis=2)
    failed = np.zeros(slots.shape, dtype=np.bool_)
    rows = np.arange(len(slots))
    while True:
        repeated = (_repeated(slots[rows]) & ~failed[rows]).reshape(len(rows), -1)
        some = repeated.any(axis=1)
        if not some.any():
            return
        rows = rows[some]
        rank, a = np.divmod(repeated[some].argmax(axis=1), slots.shape[2])
        other, b, worst = _least_harm(slots[rows], weights[rows], load[rows], rank, a)
        possible = worst < np.inf
        failed[rows[~possible], rank[~possible], a[~possible]] = True
        done = [values[possible] for values in (rows, rank, a, other, b)]
        _exchange(slots, weights, load, *done)


def _repeated(slots: Ints) -> NDArray[np.bool_]:
    """Which slots have an expert that an earlier slot of their rank has too."""
    # Slots first, so that the comparisons run over long rows.
    by_slot = np.ascontiguousarray(slots.transpose(2, 0, 1))
    repeated = np.zeros(by_slot.shape, dtype=np.bool_)
    for distance in range(1, len(by_slot)):
        repeated[distance:] |= by_slot[distance:] == by_slot[:-distance]
    return repeated.transpose(1, 2, 0)


def _least_harm(slots: Ints, weights: Floats, load: Floats, rank: Ints, a: Ints) -> tuple[Ints, Ints, Floats]:
    """The exchange that frees each row's slot `a` of `rank` at the smallest larger load of the two ranks."""
    each = np.arange(len(slots))
    expert = slots[each, rank, a][:, None, None]
    holds_expert = (slots == expert).any(axis=2, keepdims=True)
    held_here = np.zeros(slots.shape, dtype=np.bool_)
    for held in slots[each, rank].T:
        held_here |= slots == held[:, None, None]
    moved = weights[each, rank, a][:, None, None] - weights
    worst = np.maximum(load[each, rank][:, None, None] - moved, load[:, :, None] + moved)
    worst = np.where(holds_expert | held_here | (slots < 0), np.inf, worst).reshape(len(slots), -1)
    best = worst.argmin(axis=1)
    other, b = np.divmod(best, slots.shape[2])
    return other, b, worst[each, best]
