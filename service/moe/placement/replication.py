"""How many replicas each expert gets."""

import numpy as np
from numpy.typing import NDArray


def replicate(loads: NDArray[np.float64], num_physical: int, limit: int) -> NDArray[np.int64]:
    """Replicas of each expert, int64 [rows, experts]: at least one, `num_physical` in all.

    limit  the most that an expert gets, unless all get as many

    Each replica beyond the first goes to the expert with the largest load per replica, as in DeepSeek's EPLB;
    equal ones are served from the lowest expert. `loads` is float64 [rows, experts].
    """
    rows, num_experts = loads.shape
    first = np.arange(rows) * num_experts
    counts = np.ones(rows * num_experts, dtype=np.int64)
    limit = max(limit, -(-num_physical // num_experts))
    flat_loads = loads.ravel()
    per_replica = loads.copy()
    flat = per_replica.ravel()
    for _ in range(num_physical - num_experts):
        chosen = first + per_replica.argmax(axis=1)
        count = counts[chosen] + 1
        counts[chosen] = count
        flat[chosen] = np.where(count < limit, flat_loads[chosen] / count, -1.0)
    return counts.reshape(rows, num_experts)
