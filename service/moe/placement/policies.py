"""The policies that make a placement from measured loads."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from expertd.service.moe.placement.checks import checked_loads, require
from expertd.service.moe.placement.packing import Floats, Ints, pack, slot_loads, slot_mask
from expertd.service.moe.placement.placement import Placement, rank_slots
from expertd.service.moe.placement.replication import replicate
from expertd.service.moe.placement.swaps import level, separate

# For experts without load, so small that it changes no decision: spares are spread evenly over them.
LEAST_LOAD = 1e-12
# max/mean below which a layer is not improved further, unless the greedy rules reach less.
NEARLY_LEVEL = 1.001
# max/mean that counts as perfect: 1.0000, to four decimals.
LEVEL = 1.00005
# Sums in another order differ by less.
ROUNDING = 1 + 1e-12


def global_placement(loads: ArrayLike, num_ranks: int, num_physical: int) -> Placement:
    """Replicas to the experts with most load each, packed onto all ranks.

    loads         [num_layers, num_experts], any non-negative measure: tokens, or activation frequencies
    num_physical  physical experts of a layer, at least num_experts; the first num_physical % num_ranks ranks
                  hold one more than the others

    A layer's max/mean is never above 1.00005 or what DeepSeek's greedy rules reach (replicate the most loaded
    expert, pack the heaviest replica first). No rank holds an expert twice, unless there are more replicas
    than that allows, or no way to it is found within that bound.
    Raises ValueError (name, expected, got).
    """
    checked = checked_loads(loads)
    num_experts = checked.shape[1]
    capacity = rank_slots(num_physical, num_ranks)
    require(
        "num_physical", num_physical >= num_experts, f"at least num_experts ({num_experts})", num_physical
    )
    return Placement(_place(_relative(checked), capacity), num_experts, num_ranks)


def hierarchical_placement(
    loads: ArrayLike, num_ranks: int, num_physical: int, *, num_nodes: int, num_groups: int
) -> Placement:
    """Groups of experts packed onto nodes; then, in each node, replicas and ranks as in `global_placement`.

    For models whose router limits a token to some groups (`num_expert_groups`), so that a token goes to few
    nodes. Nodes get equally many groups, and ranks equally many replicas: num_nodes divides num_groups and
    num_ranks, num_groups divides num_experts, num_ranks divides num_physical.
    Raises ValueError (name, expected, got).
    """
    checked = checked_loads(loads)
    num_layers, num_experts = checked.shape
    rank_slots(num_physical, num_ranks)
    require("num_nodes", num_nodes >= 1, "at least 1", num_nodes)
    require("num_ranks", num_ranks % num_nodes == 0, f"a multiple of num_nodes ({num_nodes})", num_ranks)
    named = f"a positive multiple of num_nodes ({num_nodes})"
    require("num_groups", num_groups >= 1 and num_groups % num_nodes == 0, named, num_groups)
    named = f"a divisor of num_experts ({num_experts})"
    require("num_groups", num_experts % num_groups == 0, named, num_groups)
    named = f"a multiple of num_ranks ({num_ranks}), at least num_experts ({num_experts})"
    require(
        "num_physical", num_physical % num_ranks == 0 and num_physical >= num_experts, named, num_physical
    )
    relative = _relative(checked)
    group_loads = relative.reshape(num_layers, num_groups, -1).sum(axis=2)
    to_node = np.full(num_nodes, num_groups // num_nodes)
    groups = pack(group_loads, np.ones_like(group_loads, dtype=np.int64), to_node)
    group_size = num_experts // num_groups
    # The experts of each node: [layers * nodes, experts of a node].
    experts = (groups[..., None] * group_size + np.arange(group_size)).reshape(num_layers * num_nodes, -1)
    by_node = relative[np.repeat(np.arange(num_layers), num_nodes)[:, None], experts]
    capacity = rank_slots(num_physical // num_nodes, num_ranks // num_nodes)
    placed = np.take_along_axis(experts, _place(by_node, capacity, num_nodes), axis=1)
    return Placement(placed.reshape(num_layers, num_physical), num_experts, num_ranks)


def activation_frequencies(tokens_per_step: ArrayLike) -> NDArray[np.float64]:
    """Loads for decode: the share of steps in which each expert got any token, float64 [layers, experts].

    tokens_per_step  [steps, num_layers, num_experts], tokens of each expert in each of some measured steps

    A decode step reads the weights of every activated expert, however few its tokens, so its time follows the
    number of activated experts by rank (METRO, arXiv 2512.09277).
    """
    counts = np.asarray(tokens_per_step)
    require("tokens_per_step", counts.ndim == 3 and len(counts) > 0, "[steps, layers, experts]", counts.shape)
    checked = checked_loads(counts.reshape(len(counts), -1), "tokens_per_step")
    frequencies: NDArray[np.float64] = (checked > 0).mean(axis=0).reshape(counts.shape[1:])
    return frequencies


def _relative(loads: Floats) -> Floats:
    """Each row relative to its largest load, in (0, 1]; a row without any load counts as even."""
    largest = loads.max(axis=1, keepdims=True)
    relative: Floats = np.divide(loads, largest, out=np.ones_like(loads), where=largest > 0)
    np.maximum(relative, LEAST_LOAD, out=relative)
    return relative


def _place(loads: Floats, capacity: Ints, num_nodes: int = 1) -> Ints:
    """Experts by slot, int64 [rows, all slots], rank after rank; a layer is a row for each of its nodes."""
    counts = replicate(loads, int(capacity.sum()), len(capacity))
    slots = pack(loads / counts, counts, capacity)
    greedy, allowed = _greedy(loads, counts, slots, capacity)
    of_nodes = loads.sum(axis=1).reshape(-1, num_nodes) / len(capacity)
    allowed = np.maximum(allowed.reshape(of_nodes.shape).max(axis=1), of_nodes.mean(axis=1) * LEVEL)
    # No placement reaches less than the mean of the node with most load.
    nearly = np.minimum(allowed, of_nodes.max(axis=1) * NEARLY_LEVEL)
    allowed = np.repeat(allowed, num_nodes)
    separate(slots, loads / counts)
    level(slots, loads / counts, np.repeat(nearly, num_nodes))
    level(slots, loads / counts, allowed)  # more turns for those that exceed it still
    worse = _largest(loads / counts, slots) > allowed * ROUNDING
    slots[worse] = greedy[worse]
    return slots[:, slot_mask(capacity)]


def _greedy(loads: Floats, counts: Ints, slots: Ints, capacity: Ints) -> tuple[Ints, Floats]:
    """Slots by the greedy rules alone, and their largest loads: what a placement must not exceed.

    These are `slots`, except where `counts` is as high as its limit: the greedy rules have none.
    """
    greedy, largest = slots.copy(), _largest(loads / counts, slots)
    rows = np.flatnonzero((counts >= len(capacity)).any(axis=1))
    if len(rows):
        total = int(capacity.sum())
        counts = replicate(loads[rows], total, total)
        greedy[rows] = pack(loads[rows] / counts, counts, capacity)
        largest[rows] = _largest(loads[rows] / counts, greedy[rows])
    return greedy, largest


def _largest(per_replica: Floats, slots: Ints) -> Floats:
    """Each row's largest load of a rank."""
    largest: Floats = slot_loads(per_replica, slots).sum(axis=2).max(axis=1)
    return largest
