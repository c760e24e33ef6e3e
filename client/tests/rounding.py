"""How far a token's output may differ between two steps."""

from typing import Any

import numpy as np


def assert_rounded(output: Any, expected: Any) -> None:
    """They are equal but for bf16's rounding, which on a CPU may differ in steps with other requests."""
    np.testing.assert_allclose(output, expected, rtol=0, atol=2**-7 * np.abs(expected).max())
