"""Replicas onto ranks: each rank gets a given number of them, and loads as equal as possible."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def pack(per_replica: Floats, counts: Ints, capacity: Ints) -> Ints:
    """Experts by slot, int64 [rows, ranks, slots], -1 where a rank has fewer slots than the others.

    per_replica  float64 [rows, experts], the load of one replica of each expert
    counts       int64 [rows, experts], replicas of each expert; a row's sum is capacity's
    capacity     int64 [ranks], slots of each rank

    The longest-first greedy rule of DeepSeek's EPLB: replicas by falling load, each to the least loaded rank
    that has room. Equal ones go in the order of experts and of ranks. A turn places one replica of each row.
    """
    rows = len(per_replica)
    num_ranks, total = len(capacity), int(capacity.sum())
    order = np.argsort(-per_replica, axis=1, kind="stable")
    experts = np.repeat(order.ravel(), np.take_along_axis(counts, order, axis=1).ravel()).reshape(rows, total)
    weights = np.ascontiguousarray(np.take_along_axis(per_replica, experts, axis=1).T)
    rank_of = np.empty((total, rows), dtype=np.int64)
    load = np.where(capacity > 0, np.zeros((rows, num_ranks)), np.inf)
    flat, room = load.ravel(), np.tile(capacity, rows)
    first = np.arange(rows) * num_ranks
    # Added to a load, by the room that is left: a full rank is never the least loaded.
    penalty = np.zeros(int(capacity.max()))
    penalty[0] = np.inf
    for turn in range(total):
        at = first + load.argmin(axis=1, out=rank_of[turn])
        left = room[at] - 1
        room[at] = left
        flat[at] += weights[turn] + penalty[left]
    # Few ranks fit into 16 bits, which NumPy sorts by radix.
    by_rank = np.argsort(np.ascontiguousarray(rank_of.T, dtype=np.uint16), axis=1, kind="stable")
    return spread_slots(np.take_along_axis(experts, by_rank, axis=1), capacity)


def slot_mask(capacity: Ints) -> NDArray[np.bool_]:
    """Which of the slots [ranks, slots] exist: all, where every rank has as many."""
    return np.arange(int(capacity.max())) < capacity[:, None]


def spread_slots(experts: Ints, capacity: Ints) -> Ints:
    """Experts [rows, all slots], rank after rank, as [rows, ranks, slots]; -1 where there is no slot."""
    mask = slot_mask(capacity)
    slots = np.full((len(experts), *mask.shape), -1, dtype=np.int64)
    slots[:, mask] = experts
    return slots


def slot_loads(per_replica: Floats, slots: Ints) -> Floats:
    """The load of each slot, float64 [rows, ranks, slots]; 0 where there is none."""
    rows = np.arange(len(slots))[:, None, None]
    return np.where(slots >= 0, per_replica[rows, slots], 0.0)
