"""The policy that makes a placement from measured loads: DeepSeek's greedy rules, then exchanges."""

import heapq

import numpy as np
from numpy.typing import ArrayLike

from expertd.service.moe.placement.placement import (
    Floats,
    Ints,
    Placement,
    checked_loads,
    require,
    require_room,
)
from expertd.service.moe.placement.search import Search
from expertd.service.moe.split import parts_of

# For experts without load, so small that it changes no decision: spares are spread evenly over them.
MIN_LOAD = 1e-12
# max/mean below which a layer is not improved further, unless the greedy rules reach less.
NEARLY_LEVEL = 1.001
# max/mean that counts as perfect: 1.0000, to four decimals.
LEVEL = 1.00005
# Sums in another order differ by less.
ROUNDING = 1 + 1e-12


def global_placement(loads: ArrayLike, num_ranks: int, num_physical: int) -> Placement:
    """Replicas to the experts with most load each, packed onto all ranks.

    loads         [num_experts], any non-negative measure: tokens, or steps that activated an expert
    num_physical  at least num_experts; the first num_physical % num_ranks ranks hold one more than the others

    max/mean is never above 1.00005 or what DeepSeek's greedy rules reach (replicate the most loaded expert,
    pack the heaviest replica first). No rank holds an expert twice, unless there are more replicas than that
    allows, or no way to it is found within that bound.
    Raises ValueError (name, expected, got).
    """
    checked = checked_loads(loads)
    require("num_ranks", num_ranks >= 1, "at least 1", num_ranks)
    require_room(num_physical, len(checked))
    largest = checked.max()
    relative = np.maximum(checked / largest if largest else np.ones_like(checked), MIN_LOAD)
    greedy = _packed(relative, _replicas(relative, num_physical, num_physical), num_ranks)
    apart = _packed(relative, _replicas(relative, num_physical, num_ranks), num_ranks)
    mean = relative.sum() / num_ranks
    allowed = max(float(greedy.load_by_rank(relative).max()), mean * LEVEL)
    search = Search(apart.physical_to_logical.copy(), apart.rank_of_slot(), relative)
    search.separate()
    search.level(min(allowed, mean * NEARLY_LEVEL))
    if search.load.max() > allowed * ROUNDING:
        return greedy
    return Placement(search.slots, len(checked), num_ranks)


def _replicas(loads: Floats, num_physical: int, limit: int) -> Ints:
    """Replicas of each expert, int64 [num_experts]: at least one, `num_physical` in all.

    limit  the most that an expert gets, unless all get as many

    Each replica beyond the first goes to the expert with the largest load per replica, as in DeepSeek's EPLB;
    of equal ones, to the lowest expert.
    """
    limit = max(limit, -(-num_physical // len(loads)))
    counts, per_replica = np.ones(len(loads), np.int64), loads.copy()
    for _ in range(num_physical - len(loads)):
        expert = per_replica.argmax()
        counts[expert] += 1
        per_replica[expert] = loads[expert] / counts[expert] if counts[expert] < limit else -1.0
    return counts


def _packed(loads: Floats, counts: Ints, num_ranks: int) -> Placement:
    """Replicas by falling load, each to the least loaded rank that has room, as in DeepSeek's EPLB.

    Equal ones go in the order of experts and of ranks.
    """
    per_replica = loads / counts
    order = np.argsort(-per_replica, kind="stable")
    room = [len(part) for part in parts_of(int(counts.sum()), num_ranks)]
    held: list[list[int]] = [[] for _ in room]
    waiting = [(0.0, rank) for rank in range(num_ranks) if room[rank]]
    for expert in np.repeat(order, counts[order]).tolist():
        load, rank = heapq.heappop(waiting)
        held[rank].append(expert)
        if len(held[rank]) < room[rank]:
            heapq.heappush(waiting, (load + per_replica[expert], rank))
    return Placement(np.array([expert for experts in held for expert in experts]), len(loads), num_ranks)
