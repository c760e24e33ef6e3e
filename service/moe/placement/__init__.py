"""Which rank holds which experts of a layer: placements, the policy that makes them, changes between them.

Pure functions of NumPy arrays. One process computes a placement for all ranks;
docs/internals/placement.md explains it.
"""

from expertd.service.moe.placement.changes import Change, count_moves, plan_change, relabel
from expertd.service.moe.placement.placement import Placement, contiguous_placement
from expertd.service.moe.placement.policy import global_placement

__all__ = [
    "Change",
    "Placement",
    "contiguous_placement",
    "count_moves",
    "global_placement",
    "plan_change",
    "relabel",
]
