"""Checks of what callers give to placements."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def require(name: str, holds: bool, expected: str, got: object) -> None:
    """Raises ValueError unless `holds`."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got}")


def checked_loads(loads: ArrayLike, name: str = "loads") -> NDArray[np.float64]:
    """Loads as float64 [rows, experts]: finite, not negative, at least one row and one expert."""
    try:
        checked = np.asarray(loads, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected numbers [num_layers, num_experts], got {loads!r:.80}") from None
    require(name, checked.ndim == 2 and checked.size > 0, "[num_layers, num_experts]", list(checked.shape))
    wrong = ~(np.isfinite(checked) & (checked >= 0))
    if wrong.any():
        layer, expert = (int(i) for i in np.argwhere(wrong)[0])
        got = f"{checked[layer, expert]} at [{layer}, {expert}]"
        raise ValueError(f"{name}: expected finite numbers, not negative, got {got}")
    return checked


def described(values: NDArray[Any]) -> str:
    """An array's dtype and shape, for error messages."""
    return f"{values.dtype} {list(values.shape)}"
