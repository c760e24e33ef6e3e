"""Which tile a grouped GEMM runs with: the closed list of variants and the pure choice between them."""

from dataclasses import dataclass
from enum import Enum

from kernels.jit import Source

BLOCK_K = 128
SHARED_BYTES_LIMIT = 232_448  # what a Hopper CTA can have


class Layout(Enum):
    """How rows lie: sorted by group without padding, or [groups, max_m] with a count for each group."""

    CONTIGUOUS = "contiguous"
    MASKED = "masked"


@dataclass(frozen=True)
class TileConfig:
    """What is compiled in.

    swapped   weights on the tensor cores' M side and tokens on the N side (heights in steps of 16, not 64)
    block_m   rows a CTA's tile has at most
    block_n   columns it has: a block of weight scales, or half of one
    stages    K blocks of both operands in flight
    cluster   CTAs that take neighbouring columns and load the tokens together
    box_m     rows one TMA load brings
    """

    swapped: bool
    block_m: int
    block_n: int
    stages: int
    cluster: int
    box_m: int

    @property
    def name(self) -> str:
        """Short and unique among the variants of a layout."""
        return f"{'swapped' if self.swapped else 'straight'}_{self.block_m}x{self.block_n}_c{self.cluster}"

    @property
    def threads(self) -> int:
        """A producer warpgroup, and a consumer warpgroup for every 64 of the tensor cores' M side."""
        return 128 * (1 + (self.block_n if self.swapped else self.block_m) // 64)

    @property
    def storage_bytes(self) -> int:
        """Size of SharedStorage in storage.cuh; the compiler checks it."""
        stage = (self.block_n + self.block_m) * BLOCK_K + self.block_m * 4 + 2 * 8
        staging = (self.threads // 128 - 1) * (4096 if self.swapped else 64 * (self.block_n * 2 + 16))
        tiles = (self.stages + 2) * (16 + 8)
        return self.stages * stage + staging + tiles + -(-self.threads // 32 * 4 // 8) * 8

    def shared_bytes(self, num_groups: int) -> int:
        """Dynamic shared memory of a CTA: the storage, and two numbers a group."""
        return self.storage_bytes + 2 * (num_groups + 1) * 4


# Few rows a group: weights stream past once through a deep ring. Many: three warpgroups of 64 rows each, and
# where there is work for many waves the tokens are loaded by two CTAs together.
SHORT = TileConfig(swapped=True, block_m=64, block_n=128, stages=8, cluster=1, box_m=16)
SHORT_NARROW = TileConfig(swapped=True, block_m=64, block_n=64, stages=12, cluster=1, box_m=16)
TALL = TileConfig(swapped=False, block_m=192, block_n=128, stages=4, cluster=1, box_m=64)
TALL_PAIR = TileConfig(swapped=False, block_m=192, block_n=128, stages=4, cluster=2, box_m=32)
CONFIGS = (SHORT, SHORT_NARROW, TALL, TALL_PAIR)

_PAIR_ROWS = 1024  # a group; with fewer, pairs measured level or slower
_PAIR_WAVES = 8


def choose(n: int, num_groups: int, expected_rows: float, num_sms: int) -> TileConfig:
    """The tile for num_groups groups of about expected_rows rows, n columns; all give the same bits."""
    if expected_rows <= SHORT.block_m:
        return SHORT
    waves = num_groups * expected_rows / TALL.block_m * n / TALL.block_n / num_sms
    return TALL_PAIR if num_sms > 1 and expected_rows >= _PAIR_ROWS and waves >= _PAIR_WAVES else TALL


def source(layout: Layout, config: TileConfig) -> Source:
    """The variant's source for the JIT."""
    return Source(
        name=f"{layout.value}_{config.name}",
        file="grouped_gemm_fp8.cu",
        entry="grouped_gemm_fp8",
        defines=(
            ("MASKED", str(int(layout is Layout.MASKED))),
            ("SWAPPED", str(int(config.swapped))),
            ("BLOCK_M", str(config.block_m)),
            ("BLOCK_N", str(config.block_n)),
            ("STAGES", str(config.stages)),
            ("CLUSTER", str(config.cluster)),
            ("BOX_M", str(config.box_m)),
            ("STORAGE_BYTES", str(config.storage_bytes)),
        ),
    )


VARIANTS = tuple((layout, config) for layout in Layout for config in CONFIGS)
