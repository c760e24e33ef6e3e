"""Which tile a GEMM runs with, and how its groups are cut: pure functions of the sizes."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from expertd.kernels.backends.hopper.rates import H200, Rates
from expertd.kernels.backends.hopper.tiles import (
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


# Fitted by hand to launches of every tile on an H200: the difference of two K gives a K block's time, and
# what is left after the start of a launch a tile's own. Other devices: by their rates.
@dataclass(frozen=True)
class _Time:
    """Nanoseconds of a tile at an H200's clock: for itself, and for a K block by the tile's steps."""

    tile: int
    k_block: tuple[int, ...]


# Of equally good plans the first is chosen. The figures are from shapes of up to three waves.
_TIMES = {
    SWAP_AB: _Time(200, (275,)),
    SHORT: _Time(300, (280,)),
    NORMAL: _Time(600, (340, 410, 530)),
    LARGE: _Time(1500, (490, 700)),
    WIDE: _Time(900, (410, 565)),
    MIDDLE: _Time(500, (305, 370)),
    NARROW: _Time(300, (180,)),
    NARROWEST: _Time(400, (150,)),
}
_BUSY_WAVES = 3  # from here on the clock falls: factors of a K block's time
_BUSY = {NORMAL: 1.09, WIDE: 1.1, LARGE: 1.13}
_MEMORY_SHARE = 0.872  # of its rate that a launch sees: 4200 bytes per ns
_L2_SHARE, _L2_MEMORY_SHARE = 0.795, 1.35  # the first 50 MB take longer, since a full L2 makes room for them
_SWAP_AB_M = {Layout.CONTIGUOUS: 24, Layout.MASKED: 48}  # upper bounds; contiguous groups are less even
_UNEVEN_SHORT_M, _SWIGLU_FEW_M = 48, 40  # upper bounds
_CLUSTER_M, _CLUSTER_K, _CLUSTER_WAVES = 224, 3072, 6  # lower bounds; below them, pairs of CTAs are no faster
_SWIGLU = SWIGLU_FEW, SWIGLU_FEW_TWICE, SWIGLU
_OTHER_GLU = GLU_FEW, GLU_FEW_TWICE, GLU
_CTA_BYTES_PER_NS = 60  # of weights, that a CTA with few rows takes in at an H200's clock
_CUTS = 6  # numbers of tiles that are tried for a group
_SIMULATED = 16  # waves; with more, the work just spreads evenly
# How far groups may deviate from the expected rows, every other one in the opposite direction.
_UNEVEN = (0.0, 0.0, 0.1, 0.2)


def choose_swiglu(expected_m: float, num_sms: int, other_glu: bool = False, rates: Rates = H200) -> GemmPlan:
    """The plan of the GEMM with an activation in its epilogue, on at least two SMs.

    other_glu: with biases, or another activation than SwiGLU.
    rates: of the device that num_sms SMs are of.
    """
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
) -> GemmPlan:
    """The plan for num_groups groups of about expected_m rows times [n, k]; all plans give the same bits.

    part: there are more columns than these n, from a multiple of 256 on; no tile may reach the others.
    rates: of the device that num_sms SMs are of.
    """
    few = expected_m <= _SWAP_AB_M[layout]
    if expected_m < 1:  # few groups have any
        num_groups, expected_m = math.ceil(num_groups * expected_m), 1.0
    rows = max(math.ceil(expected_m / 16) * 16, 16)  # rounded, since each new plan takes a millisecond
    return _choose(few, n, k, max(num_groups, 1), rows, num_sms, part, rates)


@lru_cache(maxsize=4096)
def _choose(
    few: bool, n: int, k: int, num_groups: int, rows: int, num_sms: int, part: bool, rates: Rates
) -> GemmPlan:
    plans = _candidates(few, num_groups, rows, part)
    best = min(plans, key=lambda plan: _time(plan, n, k, num_groups, rows, num_sms, rates))
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


def _candidates(few: bool, num_groups: int, rows: int, part: bool) -> Iterator[GemmPlan]:
    """The plans to compare."""
    for config in _TIMES:
        if config.block_m > 64 if few else config is SWAP_AB:
            continue  # with few rows, the warpgroups of taller tiles would be idle
        if config.block_m == 64 and num_groups > 2 and rows > _UNEVEN_SHORT_M:
            continue  # too many groups would take a second tile
        if part and 256 % config.block_n:
            continue
        if config is LARGE and num_groups == 2:
            continue  # wide tiles fill a wave better if the two have the same number of rows
        yield GemmPlan(config, 16 * config.steps)
        if config.steps == 1 or num_groups > 2:
            continue  # groups differ too much from what is expected
        # Two groups deviate from what is expected, each in its way, so no number of tiles is special.
        cuts = list(range(16 * config.steps - 4, 15, -4))
        if num_groups == 1:
            steps = math.ceil(rows / config.step)
            min_steps = math.ceil(steps / config.steps)
            cuts = [
                math.ceil(16 * steps / tiles)
                for tiles in range(min_steps + 1, min(min_steps + _CUTS, steps + 1))
            ]
        for tile_steps in cuts:
            # Tall tiles first for a single group; with two, weights would just be read twice.
            yield GemmPlan(config, tile_steps, tall_first=num_groups == 1)


def _time(
    plan: GemmPlan, n: int, k: int, num_groups: int, rows: int, num_sms: int, rates: Rates = H200
) -> float:
    """Estimated nanoseconds of a launch, without what all plans have in common."""
    columns = -(-n // plan.config.block_n)
    busy = num_groups * rows * n / (NORMAL.block_m * NORMAL.block_n * num_sms) >= _BUSY_WAVES
    compute = 0.0
    for uneven in _UNEVEN if num_groups > 1 else (0.0,):
        groups = [(num_groups - num_groups // 2, rows * (1 + uneven)), (num_groups // 2, rows * (1 - uneven))]
        tiles = [tile for count, m in groups for tile in _tiles(plan, m, columns * count)]
        compute += _makespan([(_tile_time(plan, height, k, busy), count) for height, count in tiles], num_sms)
    compute *= H200.sm_mhz / rates.sm_mhz / (len(_UNEVEN) if num_groups > 1 else 1)
    moved = num_groups * n * k + num_groups * rows * (k + 2 * n)
    in_l2 = min(moved, _L2_SHARE * rates.l2_bytes)
    memory = (moved / _MEMORY_SHARE + in_l2 / _L2_MEMORY_SHARE) / rates.bytes_per_ns
    # Of many groups some have more rows than expected: where memory limits, the first plan is good enough.
    return max(compute, memory) + (min(compute, memory) / 8 if num_groups <= 2 else 0)


def _tile_time(plan: GemmPlan, height: int, k: int, busy: bool) -> float:
    time = _TIMES[plan.config]
    steps = 1 if plan.config.swap_ab else height
    k_block = time.k_block[steps - 1]
    return time.tile + k // SCALE_BLOCK * k_block * (_BUSY.get(plan.config, 1) if busy else 1)


def _tiles(plan: GemmPlan, rows: float, columns: int) -> list[tuple[int, int]]:
    """(height, count) of the tiles that the device cuts from a group of these rows, in starting order."""
    steps = math.ceil(rows / plan.config.step)
    count = -(-16 * steps // plan.tile_steps)
    height, taller = divmod(steps, count)
    cut = [(height + 1, taller * columns), (height, (count - taller) * columns)]
    return [(height, count) for height, count in cut if count > 0]


def _makespan(tiles: list[tuple[float, int]], num_sms: int) -> float:
    """When the last of num_sms CTAs finishes, if each takes the next tile as soon as it is free."""
    total = sum(count for _, count in tiles)
    if total > _SIMULATED * num_sms:
        return sum(time * count for time, count in tiles) / num_sms + max(time for time, _ in tiles) / 2
    free = {0.0: num_sms}  # time -> CTAs free from then on
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
