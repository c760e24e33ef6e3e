"""The tiles of the grouped GEMM: the closed list of configurations, and a pure function that chooses one."""

import math
from dataclasses import dataclass
from functools import lru_cache

from expertd.layout import Layout
from expertd.limits import SCALE_BLOCK

BLOCK_N = SCALE_BLOCK  # rows of b in a CTA's tile; a K block needs one scale of b
BLOCK_K = SCALE_BLOCK
SHARED_BYTES_LIMIT = 232_448  # the most a Hopper CTA can have


@dataclass(frozen=True, eq=False)  # one instance per configuration, used as a dictionary key by every launch
class TileConfig:
    """Compile-time parameters.

    swap_ab   b on the tensor cores' M side and a on the N side (tile heights in steps of 16, not 64)
    block_m   rows of a in a CTA's tile, at most
    stages    K blocks of both operands in flight
    cluster   CTAs with neighboring columns that load the rows of a together
    box_m     rows of a per TMA load
    swiglu    out is silu(gate) * up in FP8 with scales; b has the gate rows first, then the up rows
    """

    swap_ab: bool
    block_m: int
    stages: int
    cluster: int
    box_m: int
    swiglu: bool = False
    block_n: int = BLOCK_N

    @property
    def name(self) -> str:
        """The name of its variants: short, and unique within a layout."""
        swap_ab = "swap_ab_" if self.swap_ab else ""
        cluster = f"_cluster{self.cluster}" if self.cluster > 1 else ""
        wide = f"n{self.block_n}" if self.block_n != BLOCK_N else ""
        return f"{swap_ab}m{self.block_m}{wide}{cluster}{'_swiglu' if self.swiglu else ''}"

    @property
    def out_block_n(self) -> int:
        """Columns of out in a CTA's tile, and rows of b per TMA load."""
        return self.block_n // 2 if self.swiglu else self.block_n

    @property
    def threads(self) -> int:
        """Threads per CTA: a producer warpgroup, and a consumer warpgroup for every 64 rows on the M side."""
        return 128 * (1 + (2 if self.swap_ab else self.block_m // 64))

    @property
    def storage_bytes(self) -> int:
        """Size of SharedStorage in csrc/storage.cuh, which asserts it."""
        groups = self.threads // 128 - 1
        scales = self.block_m * 4 * (2 if self.swiglu or SCALE_BLOCK % self.block_n else 1)
        stage = (self.block_n + self.block_m) * BLOCK_K + scales + 2 * 8
        staging = groups * (4096 if self.swap_ab or self.swiglu else 64 * -(-self.block_n // 64) * 64 * 2)
        exchange = 2 * 4 * groups * (64 + 8) if self.swiglu else 0
        tiles = (self.stages + 3) * (16 + 8)  # kTiles records, each with its barrier
        return -(-(self.stages * stage + staging + exchange + tiles) // 16) * 16

    def shared_bytes(self, num_groups: int) -> int:
        """Dynamic shared memory per CTA in bytes: the storage and the scheduler's table."""
        return self.storage_bytes + (num_groups + 1) * 4

    @property
    def step(self) -> int:
        """Rows per step; a tile's height is a whole number of steps."""
        return 16 if self.swap_ab else 64

    @property
    def steps(self) -> int:
        """Steps in the tallest tile."""
        return self.block_m // self.step


# Few rows per group: weights stream once through a deep ring. Many: three warpgroups of 64 rows each; with
# enough work for many waves, two CTAs load the rows of a together.
SWAP_AB = TileConfig(swap_ab=True, block_m=64, stages=8, cluster=1, box_m=16)
NORMAL = TileConfig(swap_ab=False, block_m=192, stages=4, cluster=1, box_m=64)
NORMAL_CLUSTER2 = TileConfig(swap_ab=False, block_m=192, stages=4, cluster=2, box_m=32)
WIDE = TileConfig(swap_ab=False, block_m=128, stages=4, cluster=1, box_m=64, block_n=192)
MIDDLE = TileConfig(swap_ab=False, block_m=128, stages=6, cluster=1, box_m=64, block_n=96)
SHORT = TileConfig(swap_ab=False, block_m=64, stages=8, cluster=1, box_m=32)
NARROW = TileConfig(swap_ab=False, block_m=64, stages=13, cluster=1, box_m=32, block_n=64)
NARROWEST = TileConfig(swap_ab=False, block_m=64, stages=17, cluster=1, box_m=32, block_n=32)
CONFIGS = (SWAP_AB, NORMAL, NORMAL_CLUSTER2, WIDE, MIDDLE, SHORT, NARROW, NARROWEST)
# With SwiGLU: a scale of the result covers 128 columns, 64 from each CTA of a pair.
SWIGLU = TileConfig(swap_ab=False, block_m=192, stages=4, cluster=2, box_m=32, swiglu=True)
SWIGLU_FEW = TileConfig(swap_ab=False, block_m=64, stages=8, cluster=2, box_m=16, swiglu=True)

# All measured on an H200, see docs/kernel-log.md.
_SWAP_AB_M = {Layout.CONTIGUOUS: 24, Layout.MASKED: 48}  # upper bounds; contiguous groups are less even
_SWIGLU_FEW_M = 40  # upper bound
_CLUSTER_M, _CLUSTER_K, _CLUSTER_WAVES = 224, 3072, 6  # lower bounds; below them, pairs of CTAs are no faster
_PLANNED_WAVES = 4  # upper bound; with more waves, tiles of any height fill the gaps
# How far two groups may deviate from the expected rows, in opposite directions.
_UNEVEN = (0.0, 0.1, -0.1, 0.2, -0.2)
_TIME = {3: 1.0, 2: 0.76, 1: 0.58}  # relative time of a NORMAL tile, by its steps of 64 rows


@dataclass(frozen=True)
class Plan:
    """The launch plan of a GEMM.

    config      the tile
    tile_steps  average height of a tile, in sixteenths of a step; the device cuts each group by it
    tall_first  each group's taller tiles come before its others
    """

    config: TileConfig
    tile_steps: int
    tall_first: bool = False


_SWIGLU, _SWIGLU_FEW = (Plan(config, 16 * config.steps) for config in (SWIGLU, SWIGLU_FEW))


def choose_swiglu(expected_m: float) -> Plan:
    """The plan of the GEMM with SwiGLU in its epilogue, on at least two SMs."""
    return _SWIGLU_FEW if expected_m <= _SWIGLU_FEW_M else _SWIGLU


@lru_cache(maxsize=4096)
def choose(layout: Layout, n: int, k: int, num_groups: int, expected_m: float, num_sms: int) -> Plan:
    """The plan for num_groups groups of about expected_m rows times [n, k]; all plans give the same bits."""
    if expected_m <= _SWAP_AB_M[layout]:
        return Plan(SWAP_AB, 16 * SWAP_AB.steps)
    columns = -(-n // BLOCK_N)
    waves = num_groups * expected_m / NORMAL.block_m * columns / num_sms
    if num_sms > 1 and k >= _CLUSTER_K and expected_m >= _CLUSTER_M and waves >= _CLUSTER_WAVES:
        return Plan(NORMAL_CLUSTER2, 16 * NORMAL_CLUSTER2.steps)
    if waves <= _PLANNED_WAVES and num_groups <= 2:
        rows = math.ceil(expected_m / 16) * 16  # rounded, since each new plan takes a millisecond
        tile_steps = _tile_steps(columns, rows, num_groups, num_sms)
        # Tall tiles first only if shorter ones are planned; otherwise weights are just read twice.
        return Plan(NORMAL, tile_steps, num_groups == 1 and tile_steps < 16 * NORMAL.steps)
    return Plan(NORMAL, 16 * NORMAL.steps)


@lru_cache(maxsize=4096)
def _tile_steps(columns: int, expected_m: int, num_groups: int, num_sms: int) -> int:
    """The cut of one or two groups, over `columns` columns of tiles, that finishes earliest on average."""
    cases = _cases(expected_m, num_groups)

    def finished(tile_steps: int) -> float:
        return sum(_makespan(_tiles(steps, tile_steps, columns), num_sms) for steps in cases)

    return min(range(16 * NORMAL.steps, 15, -1), key=finished)


def _cases(expected_m: int, num_groups: int) -> list[list[int]]:
    """Steps of each group: as expected, and for two groups every unevenness in _UNEVEN."""
    if num_groups == 1:
        return [[math.ceil(expected_m / NORMAL.step)]]
    return [
        [math.ceil(expected_m * (1 + part) / NORMAL.step), math.ceil(expected_m * (1 - part) / NORMAL.step)]
        for part in _UNEVEN
    ]


def _tiles(steps: list[int], tile_steps: int, columns: int) -> list[tuple[int, int]]:
    """(height, count) of the tiles that the device cuts from groups of these steps, in starting order."""
    tiles = []
    for of_group in steps:
        count = max(-(-16 * of_group // tile_steps), -(-of_group // NORMAL.steps))
        height, taller = divmod(of_group, count)
        tiles += [(height + 1, taller * columns), (height, (count - taller) * columns)]
    return tiles


def _makespan(tiles: list[tuple[int, int]], num_sms: int) -> float:
    """When the last of num_sms CTAs finishes, if each takes the next tile as soon as it is free."""
    free = {0.0: num_sms}  # time -> CTAs free from then on
    for height, count in tiles:
        left = count
        while left > 0:
            time = min(free)
            taken = min(left, free[time])
            left -= taken
            free[time] -= taken
            if not free[time]:
                del free[time]
            done = round(time + _TIME[height], 6)
            free[done] = free.get(done, 0) + taken
    return max(free)
