"""Which tile a grouped GEMM runs with: the closed list of variants and the pure choice between them."""

import math
from dataclasses import dataclass
from functools import lru_cache

from expertd.kernels.jit import Source
from expertd.layout import Layout

BLOCK_N = 128  # columns of a CTA's tile; one block of weight scales
BLOCK_K = 128
SHARED_BYTES_LIMIT = 232_448  # what a Hopper CTA can have


@dataclass(frozen=True, eq=False)  # there is one of each, and a launch looks up by them
class TileConfig:
    """What is compiled in.

    swapped   weights on the tensor cores' M side and tokens on the N side (heights in steps of 16, not 64)
    block_m   rows a CTA's tile has at most
    stages    K blocks of both operands in flight
    cluster   CTAs that take neighbouring columns and load the tokens together
    box_m     rows one TMA load brings
    swiglu    out is silu(gate) * up in FP8 with scales, b has the gates' rows and after them the ups'
    """

    swapped: bool
    block_m: int
    stages: int
    cluster: int
    box_m: int
    swiglu: bool = False

    @property
    def name(self) -> str:
        """Short and unique among the variants of a layout."""
        swiglu = "_swiglu" if self.swiglu else ""
        return f"{'swapped' if self.swapped else 'straight'}_m{self.block_m}_c{self.cluster}{swiglu}"

    @property
    def box_n(self) -> int:
        """Rows of b that one TMA load brings."""
        return self.block_n  # gates and ups lie apart

    @property
    def block_n(self) -> int:
        """Columns of out in a CTA's tile."""
        return BLOCK_N // 2 if self.swiglu else BLOCK_N

    @property
    def threads(self) -> int:
        """A producer warpgroup, and a consumer warpgroup for every 64 of the tensor cores' M side."""
        return 128 * (1 + (2 if self.swapped else self.block_m // 64))

    @property
    def storage_bytes(self) -> int:
        """Size of SharedStorage in storage.cuh; the compiler checks it."""
        groups = self.threads // 128 - 1
        scales = self.block_m * 4 * (2 if self.swiglu else 1)
        stage = (BLOCK_N + self.block_m) * BLOCK_K + scales + 2 * 8
        staging = groups * (4096 if self.swapped or self.swiglu else 64 * BLOCK_N * 2)
        largest = 2 * 4 * groups * (64 + 8) if self.swiglu else 0
        tiles = (self.stages + 3) * (16 + 8)  # kTiles records, each with its barrier
        return -(-(self.stages * stage + staging + largest + tiles) // 16) * 16

    def shared_bytes(self, num_groups: int, passes: int = 1) -> int:
        """Dynamic shared memory of a CTA: the storage, and the scheduler's table."""
        return self.storage_bytes + (num_groups + 1 + passes * num_groups + 1) * 4

    @property
    def step(self) -> int:
        """Rows that a tile's height is rounded up to."""
        return 16 if self.swapped else 64

    @property
    def steps(self) -> int:
        """Of the tallest tile."""
        return self.block_m // self.step


# Few rows a group: weights stream past once through a deep ring. Many: three warpgroups of 64 rows each, and
# where there is work for many waves the tokens are loaded by two CTAs together.
SHORT = TileConfig(swapped=True, block_m=64, stages=8, cluster=1, box_m=16)
TALL = TileConfig(swapped=False, block_m=192, stages=4, cluster=1, box_m=64)
TALL_PAIR = TileConfig(swapped=False, block_m=192, stages=4, cluster=2, box_m=32)
CONFIGS = (SHORT, TALL, TALL_PAIR)
# With SwiGLU: a scale of its result has 128 columns, 64 in each of a pair.
PAIR_SWIGLU = TileConfig(swapped=False, block_m=192, stages=4, cluster=2, box_m=32, swiglu=True)

# All measured on an H200, see kernels/README.md.
_SHORT_ROWS = {Layout.CONTIGUOUS: 24, Layout.MASKED: 48}  # at most; contiguous groups are less even
_PAIR_ROWS, _PAIR_K, _PAIR_WAVES = 224, 3072, 6  # at least; below, pairs are level or slower
_PLANNED_WAVES = 4  # at most; in more, tiles of any height fill the gaps
# How far two groups may be from the rows that are expected of each: one has what the other lacks.
_UNEVEN = (0.0, 0.1, -0.1, 0.2, -0.2)
_TIME = {3: 1.0, 2: 0.76, 1: 0.58}  # of a tile of TALL by its steps of 64 rows


@dataclass(frozen=True)
class Plan:
    """What a launch runs with.

    config      the variant
    tile_steps  height of a tile on average, in sixteenths of a step; the device cuts each group by it
    passes      1: tiles run group after group; or one for each height, tall tiles of all groups first
    """

    config: TileConfig
    tile_steps: int
    passes: int = 1


SWIGLU = Plan(PAIR_SWIGLU, 16 * PAIR_SWIGLU.steps)
"""With SwiGLU behind the GEMM: one plan for all sizes, on two SMs at least."""


@lru_cache(maxsize=4096)
def choose(layout: Layout, n: int, k: int, num_groups: int, expected_rows: float, num_sms: int) -> Plan:
    """The plan for num_groups groups of about expected_rows rows against [n, k]; all give the same bits."""
    if expected_rows <= _SHORT_ROWS[layout]:
        return Plan(SHORT, 16 * SHORT.steps)
    columns = -(-n // BLOCK_N)
    waves = num_groups * expected_rows / TALL.block_m * columns / num_sms
    if num_sms > 1 and k >= _PAIR_K and expected_rows >= _PAIR_ROWS and waves >= _PAIR_WAVES:
        return Plan(TALL_PAIR, 16 * TALL_PAIR.steps)
    if waves <= _PLANNED_WAVES and num_groups <= 2:
        rows = math.ceil(expected_rows / 16) * 16  # a plan takes a millisecond: not one for each number
        tile_steps = _tile_steps(columns, rows, num_groups, num_sms)
        # Tall tiles first, where there are lower ones on purpose: else it only reads weights twice.
        passes = TALL.steps if num_groups == 1 and tile_steps < 16 * TALL.steps else 1
        return Plan(TALL, tile_steps, passes)
    return Plan(TALL, 16 * TALL.steps)


@lru_cache(maxsize=4096)
def _tile_steps(columns: int, expected_rows: int, num_groups: int, num_sms: int) -> int:
    """The cut of one or two groups, over `columns` columns of tiles, that is finished soonest on average."""
    cases = _cases(expected_rows, num_groups)

    def finished(tile_steps: int) -> float:
        return sum(_makespan(_tiles(steps, tile_steps, columns), num_sms) for steps in cases)

    return min(range(16 * TALL.steps, 15, -1), key=finished)


def _cases(expected_rows: int, num_groups: int) -> list[list[int]]:
    """Steps of each group: as expected, and where there are two, as uneven as they may be."""
    if num_groups == 1:
        return [[math.ceil(expected_rows / TALL.step)]]
    return [
        [math.ceil(expected_rows * (1 + part) / TALL.step), math.ceil(expected_rows * (1 - part) / TALL.step)]
        for part in _UNEVEN
    ]


def _tiles(steps: list[int], tile_steps: int, columns: int) -> list[tuple[int, int]]:
    """(height, how many) as the device cuts groups of so many steps, in the order in which they begin."""
    tiles = []
    for of_group in steps:
        count = max(-(-16 * of_group // tile_steps), -(-of_group // TALL.steps))
        height, taller = divmod(of_group, count)
        tiles += [(height + 1, taller * columns), (height, (count - taller) * columns)]
    return tiles


def _makespan(tiles: list[tuple[int, int]], num_sms: int) -> float:
    """When the last of num_sms CTAs is done, each taking the next tile when it is free."""
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


def source(layout: Layout, config: TileConfig) -> Source:
    """The variant's source for the JIT."""
    return Source(
        name=f"{layout.value}_{config.name}",
        file="grouped_gemm.cu",
        entry="grouped_gemm",
        defines=(
            ("MASKED", str(int(layout is Layout.MASKED))),
            ("SWAP_AB", str(int(config.swapped))),
            ("BLOCK_M", str(config.block_m)),
            ("STAGES", str(config.stages)),
            ("CLUSTER", str(config.cluster)),
            ("BOX_M", str(config.box_m)),
            ("SWIGLU", str(int(config.swiglu))),
            ("STORAGE_BYTES", str(config.storage_bytes)),
        ),
    )


VARIANTS = (
    *((layout, config) for layout in Layout for config in CONFIGS),
    (Layout.CONTIGUOUS, PAIR_SWIGLU),
)
