"""Which rank holds which experts: placements, the policies that make them, and changes from one to another.

Pure functions of NumPy arrays. One process computes a placement for all ranks;
docs/internals/placement.md explains it.
"""

from expertd.service.moe.placement.changes import (
    Change,
    count_moves,
    plan_change,
    relabel,
)
from expertd.service.moe.placement.placement import Placement, contiguous_placement
from expertd.service.moe.placement.policies import (
    activation_frequencies,
    global_placement,
    hierarchical_placement,
)
from expertd.service.moe.placement.replicas import choose_replicas

__all__ = [
    "Change",
    "Placement",
    "activation_frequencies",
    "choose_replicas",
    "contiguous_placement",
    "count_moves",
    "global_placement",
    "hierarchical_placement",
    "plan_change",
    "relabel",
]
