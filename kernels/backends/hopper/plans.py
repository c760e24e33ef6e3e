"""Which tile a GEMM runs with, and how its groups are cut: pure functions of the sizes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from expertd.kernels.backends.hopper.rates import H200, Rates
from expertd.kernels.backends.hopper.tiles import (
    FOUR_BITS,
    GLU,
    GLU_FEW,
    GLU_FEW_TWICE,
    LARGE,
    MIDDLE,
    NARROW,
    NARROWEST,
    NORMAL,
    NORMAL_CLUSTER2,
    SHORT,
    SWAP_AB,
    SWAP_AB_TWICE,
    SWIGLU,
    SWIGLU_FEW,
    SWIGLU_FEW_TWICE,
    WIDE,
    TileConfig,
)
from expertd.layout import Layout
from expertd.limits import SCALE_BLOCK
from expertd.weight_format import WeightFormat


@dataclass(frozen=True)
class GemmPlan:
    """The launch plan of a GEMM.

    config      the tile
    tile_steps  average height of a tile, in sixteenths of a step; the device cuts each group by it
    tall_first  each group's taller tiles come before its others
    """

    config: TileConfig
    tile_steps: int
    tall_first: bool = False


# Fitted to the measured plans of 68 GEMMs of one to four groups, on an H200 with a cold L2 cache. Nanoseconds
# at its clock:
_TILE, _TILE_AREA = 90, 2.54  # a tile's own: in any case, and for each column of 64 rows
_COLUMN, _STEP, _STEP_COLUMN = 1.775, 56.5, 0.234  # a K block's: for each column, step, and column of a step
_SWAP_AB, _SWAP_AB_STEP = 192, 13.2  # with swap_ab, a K block's: in any case, and for each step
_MEMORY_SHARE = 0.872  # of its rate that a launch sees: 4200 bytes per ns
_OVERLAP = 4  # computing and memory add up in this norm: the longer one hides most of the other
# Of equally good plans the first is chosen.
_CONFIGS = (SWAP_AB, SHORT, NORMAL, LARGE, WIDE, MIDDLE, NARROW, NARROWEST)
_SWAP_AB_M = {Layout.CONTIGUOUS: 24, Layout.MASKED: 48}  # upper bounds; contiguous groups are less even
_SWAP_AB_FEW_M, _UNEVEN_SHORT_M, _SWIGLU_FEW_M = 144, 48, 40  # upper bounds
# Upper bounds, measured with MXFP4. Even groups are equally fast at some 50 rows, with an activation at 24;
# uneven ones at fewer.
_FOUR_BITS_FEW_M, _FOUR_BITS_GLU_FEW_M = 40, 24
_CLUSTER_M, _CLUSTER_K, _CLUSTER_WAVES = 224, 3072, 6  # lower bounds; below them, pairs of CTAs are no faster
_SWIGLU = SWIGLU_FEW, SWIGLU_FEW_TWICE, SWIGLU
_OTHER_GLU = GLU_FEW, GLU_FEW_TWICE, GLU
_CTA_BYTES_PER_NS = 60  # of weights, that a CTA with few rows takes in at an H200's clock
_FEW_GROUPS = 4  # upper bound
_BAND = 8  # tiles of a column that start in a row, as in csrc/scheduler.cuh
_CUTS = 6  # numbers of tiles that are tried for a group
_SIMULATED = 16  # waves; with more, the work just spreads evenly
# How far groups may deviate from the expected rows, every other one in the opposite direction.
_UNEVEN = (0.0, 0.0, 0.2, 0.4)


def choose_swiglu(
    expected_m: float,
    num_sms: int,
    other_glu: bool = False,
    rates: Rates = H200,
    weights: WeightFormat = WeightFormat.FP8,
    group_size: int = SCALE_BLOCK,
) -> GemmPlan:
    """The plan of the GEMM with an activation in its epilogue, on at least two SMs.

    other_glu: with biases, or another activation than SwiGLU.
    rates: of the device that num_sms SMs are of.
    weights: their format, with a scale for group_size columns.
    """
    if weights is not WeightFormat.FP8:
        of_format = FOUR_BITS[weights, group_size]
        few, many = of_format.other_glu if other_glu else of_format.swiglu
        config = few if expected_m <= _FOUR_BITS_GLU_FEW_M else many
        return GemmPlan(config, 16 * config.steps)
    few, twice, config = _OTHER_GLU if other_glu else _SWIGLU
    if expected_m <= _SWIGLU_FEW_M:
        config = few if _memory_limits(num_sms, rates) else twice
    return GemmPlan(config, 16 * config.steps)


def choose(
    layout: Layout,
    n: int,
    k: int,
    num_groups: int,
    expected_m: float,
    num_sms: int,
    part: bool = False,
    rates: Rates = H200,
    weights: WeightFormat = WeightFormat.FP8,
    group_size: int = SCALE_BLOCK,
) -> GemmPlan:
    """The plan for num_groups groups of about expected_m rows times [n, k]; all plans give the same bits.

    part: there are more columns than these n, from a multiple of 256 on; no tile may reach the others.
    rates: of the device that num_sms SMs are of.
    weights: their format, with a scale for group_size columns.
    """
    if weights is not WeightFormat.FP8:
        few_rows, many_rows = FOUR_BITS[weights, group_size].plain
        is_few = expected_m <= _FOUR_BITS_FEW_M or num_sms < many_rows.cluster
        config = few_rows if is_few else many_rows
        return GemmPlan(config, 16 * config.steps)
    few = expected_m <= _SWAP_AB_M[layout]
    if expected_m < 1:  # few groups have any
        num_groups, expected_m = math.ceil(num_groups * expected_m), 1.0
    rows = max(math.ceil(expected_m / 16) * 16, 16)  # rounded: few new plans, each of which takes time
    return _choose(few, n, k, max(num_groups, 1), rows, num_sms, part, rates)


@lru_cache(maxsize=4096)
def _choose(
    few: bool, n: int, k: int, num_groups: int, rows: int, num_sms: int, part: bool, rates: Rates
) -> GemmPlan:
    def time(plan: GemmPlan) -> float:
        return _time(plan, n, k, num_groups, rows, num_sms, rates)

    # Of several groups, whose rows are hardly known, they are faster on the mean while the weights fit.
    tall_first = num_groups == 1 or (num_groups <= _FEW_GROUPS and num_groups * n * k <= rates.l2_bytes)
    best = min(_candidates(few, num_groups, rows, part, tall_first), key=time)
    if num_groups == 1 and best.tall_first:
        # Tiles of the same weights had better start side by side, unless the last one then ends later.
        best = min(replace(best, tall_first=False), best, key=time)
    waves = num_groups * rows / NORMAL.block_m * -(-n // NORMAL.block_n) / num_sms
    if (
        best.config is NORMAL and num_sms > 1
        and k >= _CLUSTER_K and rows >= _CLUSTER_M and waves >= _CLUSTER_WAVES
    ):  # fmt: skip
        return GemmPlan(NORMAL_CLUSTER2, 16 * NORMAL_CLUSTER2.steps)
    if best.config is SWAP_AB and rows <= SWAP_AB.step and not _memory_limits(num_sms, rates):
        return GemmPlan(SWAP_AB_TWICE, 16 * SWAP_AB_TWICE.steps)
    return best


def _memory_limits(num_sms: int, rates: Rates) -> bool:
    """Whether one CTA an SM, with few rows, takes in as many weights as memory gives."""
    taken = num_sms * _CTA_BYTES_PER_NS * rates.sm_mhz / H200.sm_mhz
    return taken >= _MEMORY_SHARE * rates.bytes_per_ns


def _candidates(few: bool, num_groups: int, rows: int, part: bool, tall_first: bool) -> Iterator[GemmPlan]:
    """The plans to compare. tall_first: in them, where tiles have several steps of 64 rows."""
    for config in _CONFIGS:
        if config.block_m > 64 if few else config is SWAP_AB and (num_groups > 2 or rows > _SWAP_AB_FEW_M):
            continue  # with few rows, the warpgroups of taller tiles would be idle
        if config.block_m == 64 and num_groups > 2 and rows > _UNEVEN_SHORT_M:
            continue  # too many groups would take a second tile
        if part and 256 % config.block_n:
            continue
        cuts = [16 * config.steps]
        if num_groups == 1:
            steps = math.ceil(rows / config.step)
            min_steps = math.ceil(steps / config.steps)
            end = min(min_steps + _CUTS, steps + 1)
            cuts += [math.ceil(16 * steps / tiles) for tiles in range(min_steps + 1, end)]
        elif num_groups == 2 and not config.swap_ab:
            # The two deviate from what is expected, each in its way, so no number of tiles is special. More
            # groups differ too much from it.
            cuts += range(16 * config.steps - 4, 15, -4)
        for tile_steps in cuts:
            yield GemmPlan(config, tile_steps, tall_first and config.steps > 1 and not config.swap_ab)


def _time(
    plan: GemmPlan, n: int, k: int, num_groups: int, rows: int, num_sms: int, rates: Rates = H200
) -> float:
    """Estimated nanoseconds of a launch, without what all plans have in common."""
    columns = -(-n // plan.config.block_n)
    cases = _UNEVEN if num_groups > 1 else (0.0,)
    compute = 0.0
    for uneven in cases:
        if num_groups == 1 and not plan.tall_first:
            tiles = _by_columns(_cut(plan, rows), columns)
        else:  # more groups' rows are hardly known: as if tall tiles were first
            halves = (-(-num_groups // 2), rows * (1 + uneven)), (num_groups // 2, rows * (1 - uneven))
            tiles = [
                (height, of_column * columns * count)
                for count, m in halves
                for height, of_column in _cut(plan, m)
            ]
        times = [(_tile_time(plan.config, height, k), count) for height, count in tiles]
        compute += _makespan(times, num_sms) / len(cases)
    compute *= H200.sm_mhz / rates.sm_mhz
    moved = num_groups * n * k + num_groups * rows * (k + 2 * n)
    memory = moved / (_MEMORY_SHARE * rates.bytes_per_ns)
    if num_groups > _FEW_GROUPS:
        # Some have more rows than expected: where memory limits, the first plan is good enough.
        return max(compute, memory)
    return float((compute**_OVERLAP + memory**_OVERLAP) ** (1 / _OVERLAP))


def _tile_time(config: TileConfig, height: int, k: int) -> int:
    """Nanoseconds of a tile, at an H200's clock. height: in steps."""
    rows, columns, k_blocks = height * config.step, config.block_n, k // SCALE_BLOCK
    k_block = _COLUMN * columns + height * (_STEP + _STEP_COLUMN * columns)
    if config.swap_ab:
        k_block = _SWAP_AB + height * _SWAP_AB_STEP
    return round(_TILE + _TILE_AREA * rows / 64 * columns + k_blocks * k_block)


def _cut(plan: GemmPlan, rows: float) -> list[tuple[int, int]]:
    """(height, count) of the tiles that the device cuts from a column of a group, the taller ones first."""
    steps = math.ceil(rows / plan.config.step)
    count = -(-16 * steps // plan.tile_steps)
    height, taller = divmod(steps, count)
    return [(height + 1, taller), (height, count - taller)] if taller else [(height, count)]


def _by_columns(cut: list[tuple[int, int]], columns: int) -> list[tuple[int, int]]:
    """(height, count) of a group's tiles in starting order: bands of rows, each column by column."""
    heights = [height for height, count in cut for _ in range(count)]
    tiles = []
    for first in range(0, len(heights), _BAND):
        band = heights[first : first + _BAND]
        of_column = [(height, band.count(height)) for height in sorted(set(band), reverse=True)]
        tiles += of_column * columns if len(of_column) > 1 else [(band[0], len(band) * columns)]
    return tiles


def _makespan(tiles: list[tuple[int, int]], num_sms: int) -> float:
    """When the last of num_sms CTAs finishes, if each takes the next tile as soon as it is free."""
    total = sum(count for _, count in tiles)
    if total > _SIMULATED * num_sms:
        return sum(time * count for time, count in tiles) / num_sms + max(time for time, _ in tiles) / 2
    free = {0: num_sms}  # time -> CTAs free from then on
    for time, count in tiles:
        left = count
        while left > 0:
            now = min(free)
            taken = min(left, free[now])
            left -= taken
            free[now] -= taken
            if not free[now]:
                del free[now]
            free[now + time] = free.get(now + time, 0) + taken
    return max(free)
