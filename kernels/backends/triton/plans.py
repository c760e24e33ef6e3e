"""Which tile a GEMM runs with, and its grid: pure functions of the sizes."""

from collections.abc import Collection

from expertd.kernels.backends.triton.variants import COLUMNS
from expertd.layout import Layout

_UNEVEN = 1.5  # groups with this many times the expected rows should need one tile


def choose(heights: Collection[int], expected_m: float, num_groups: int, n: int, num_sms: int) -> int:
    """The tile's height for num_groups groups of about expected_m rows times n columns.

    heights: those that there are, which all give the same bits. Of those for many rows, one with which every
    SM has work is preferred.
    """
    fitting = [height for height in heights if height >= _UNEVEN * expected_m]
    if fitting:
        return min(fitting)
    tallest, columns = max(heights), -(-n // COLUMNS)
    shorter = max(height for height in heights if height < tallest)
    return tallest if num_groups * -(-expected_m // tallest) * columns >= num_sms else shorter


def max_tiles(layout: Layout, rows: int, num_groups: int, n: int, height: int) -> int:
    """The most tiles that a GEMM can have, without reading how the rows are divided.

    rows: of all groups if contiguous, else of each.
    """
    columns = -(-n // COLUMNS)
    if layout is Layout.MASKED:
        return num_groups * -(-rows // height) * columns
    filled = min(rows, num_groups)  # have a row each, and the other rows fill tiles
    return (filled + (rows - filled) // height) * columns
