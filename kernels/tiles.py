"""Which tile a grouped GEMM runs with: the closed list of variants and the pure choice between them."""

from dataclasses import dataclass
from enum import Enum

from kernels.jit import Source

BLOCK_N = 128  # columns of out a CTA; one block of weight scales
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
    block_m   rows a tile has at most
    stages    K blocks of both operands in flight
    cluster   CTAs that load the tokens of neighbouring columns together
    box_m     rows one TMA load brings
    banks     K blocks a consumer multiplies at once
    """

    swapped: bool
    block_m: int
    stages: int
    cluster: int
    box_m: int
    banks: int = 1

    @property
    def name(self) -> str:
        """Short and unique among the variants of a layout."""
        return f"{'swapped' if self.swapped else 'straight'}_m{self.block_m}_c{self.cluster}_b{self.banks}"

    @property
    def threads(self) -> int:
        """A producer warpgroup, and a consumer warpgroup for every 64 of the tensor cores' M side."""
        return 128 * (1 + (BLOCK_N if self.swapped else self.block_m) // 64)

    def shared_bytes(self, num_groups: int) -> int:
        """Dynamic shared memory of a CTA: SharedStorage in storage.cuh and the scheduler's table."""
        ring = self.stages * ((BLOCK_N + self.block_m) * BLOCK_K + self.block_m * 4 + 2 * 8)
        staging = (self.threads // 128 - 1) * 4096
        records = (self.stages + 1) * 16
        scratch = self.threads // 32 * 4
        return ring + staging + records + scratch + 2 * (num_groups + 1) * 4


# Few rows a group: weights stream past once, deep ring, no cluster. Many: three warpgroups of 64 rows each.
SHORT = TileConfig(swapped=True, block_m=64, stages=8, cluster=1, box_m=16)
TALL = TileConfig(swapped=False, block_m=192, stages=5, cluster=2, box_m=32)
TALL_ALONE = TileConfig(swapped=False, block_m=192, stages=5, cluster=1, box_m=32)
CONFIGS = (SHORT, TALL, TALL_ALONE)


def choose(layout: Layout, n: int, expected_rows: float, num_sms: int) -> TileConfig:
    """The tile for groups of about `expected_rows` rows and `n` columns on `num_sms` SMs; always the same bits."""
    del layout
    if expected_rows <= SHORT.block_m:
        return SHORT
    return TALL_ALONE if num_sms < TALL.cluster or n <= BLOCK_N else TALL


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
            ("STAGES", str(config.stages)),
            ("CLUSTER", str(config.cluster)),
            ("BOX_M", str(config.box_m)),
            ("BANKS", str(config.banks)),
        ),
    )


VARIANTS = tuple((layout, config) for layout in Layout for config in CONFIGS)
