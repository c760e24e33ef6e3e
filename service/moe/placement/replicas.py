"""Which replica of an expert serves a token."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from expertd.service.moe.placement.checks import described, require
from expertd.service.moe.placement.placement import Placement

# 2^32 divided by the golden ratio: its multiples spread evenly, however many there are.
GOLDEN = 2654435769


def choose_replicas(
    placement: Placement, layer: int, topk_ids: ArrayLike, positions: ArrayLike
) -> NDArray[np.int64]:
    """The physical expert of each pair, int64 [T, top_k]; -1 for an id of -1.

    topk_ids   integers [T, top_k], experts, or -1 for none
    positions  integers [T], at least 0: a token's row in its step, or for all tokens the number of the step

    Replica floor(count * h / 2^32) with h = (position + expert) * 2654435769 mod 2^32. It depends on nothing
    else, so all ranks choose the same one. If the position is the row, a step's tokens are spread over the
    replicas. If it is the number of the step, all tokens of one step use one replica: then a step activates
    no more experts than without replicas, which suits decode.
    Raises ValueError (name, expected, got).
    """
    ids, rows = np.asarray(topk_ids), np.asarray(positions)
    require("topk_ids", ids.ndim == 2 and ids.dtype.kind in "iu", "integers [T, top_k]", described(ids))
    same = rows.dtype.kind in "iu" and rows.shape == ids.shape[:1]
    require("positions", same, f"integers [{len(ids)}]", described(rows))
    require("positions", bool((rows >= 0).all()), "at least 0", rows.min(initial=0))
    require("layer", 0 <= layer < placement.num_layers, f"0 to {placement.num_layers - 1}", layer)
    known = (ids >= -1) & (ids < placement.num_experts)
    require("topk_ids", bool(known.all()), f"-1 to {placement.num_experts - 1}", ids[~known][:1])
    experts = np.maximum(ids, 0).astype(np.int64)
    mixed = (rows.astype(np.uint64)[:, None] + experts.astype(np.uint64)) * np.uint64(GOLDEN)
    count = placement.num_replicas[layer, experts].astype(np.uint64)
    which = ((mixed & np.uint64(0xFFFFFFFF)) * count >> np.uint64(32)).astype(np.int64)
    return np.where(ids < 0, -1, placement.logical_to_physical[layer, experts, which])
