"""Which tile a GEMM runs with, and its grid: pure functions of the sizes."""

from expertd.kernels.backends.triton.variants import COLUMNS, TILES, Tile
from expertd.layout import Layout

_UNEVEN = 1.5  # groups with this many times the expected rows should need one tile


def choose(expected_m: float, num_groups: int, n: int, num_sms: int) -> Tile:
    """The tile for num_groups groups of about expected_m rows times n columns; all give the same bits."""
    fitting = [tile for tile in TILES if tile.rows >= _UNEVEN * expected_m]
    best = fitting[0] if fitting else TILES[-1]
    # Short of work, SMs would idle beside the tallest tiles.
    lower = TILES[-2]
    if best is TILES[-1] and num_groups * -(-expected_m // best.rows) * -(-n // COLUMNS) < num_sms:
        return lower
    return best


def max_tiles(layout: Layout, rows: int, num_groups: int, n: int, tile: Tile) -> int:
    """The most tiles that a GEMM can have, without reading how the rows are divided.

    rows: of all groups if contiguous, else of each.
    """
    columns = -(-n // COLUMNS)
    if layout is Layout.MASKED:
        return num_groups * -(-rows // tile.rows) * columns
    filled = min(rows, num_groups)  # each with a row at least, and the other rows in as few of them as possible
    return (filled + (rows - filled) // tile.rows) * columns
