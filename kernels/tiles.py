"""Which tile a grouped GEMM runs with: the closed list of variants and the pure choice between them."""

from dataclasses import dataclass
from enum import Enum

from kernels.jit import Source

BLOCK_N = 128  # columns of out a CTA; one block of weight scales
BLOCK_K = 128
THREADS = 384
SHARED_BYTES_LIMIT = 232_448  # what a Hopper CTA can have


class Layout(Enum):
    """How rows lie: sorted by group without padding, or [groups, max_m] with a count for each group."""

    CONTIGUOUS = "contiguous"
    MASKED = "masked"


@dataclass(frozen=True)
class TileConfig:
    """What is compiled in: rows a tile has at most, ring stages, CTAs a cluster, rows a TMA load brings."""

    block_m: int
    stages: int
    cluster: int
    box_m: int

    def shared_bytes(self, num_groups: int) -> int:
        """Dynamic shared memory of a CTA: SharedStorage in grouped_gemm_fp8.cu and its table of groups."""
        ring = self.stages * ((BLOCK_N + self.block_m) * BLOCK_K + self.block_m * 4 + 2 * 8)
        staging = 2 * 2 * 16 * 128
        records = (self.stages + 1) * 16
        scratch = THREADS // 32 * 4
        return ring + staging + records + scratch + 2 * (num_groups + 1) * 4


# Few rows a group: weights stream past, deep ring, no cluster. Many: 192 rows a tile, tokens shared by two CTAs.
SHORT = TileConfig(block_m=64, stages=8, cluster=1, box_m=16)
TALL = TileConfig(block_m=192, stages=5, cluster=2, box_m=32)
CONFIGS = (SHORT, TALL)


def choose(layout: Layout, n: int, expected_rows: float, num_sms: int) -> TileConfig:
    """The tile for groups of about `expected_rows` rows and `n` columns on `num_sms` SMs; always the same bits."""
    del layout
    if expected_rows <= SHORT.block_m or num_sms < TALL.cluster or n <= BLOCK_N:
        return SHORT
    return TALL


def source(layout: Layout, config: TileConfig) -> Source:
    """The variant's source for the JIT."""
    return Source(
        name=f"{layout.value}_m{config.block_m}_c{config.cluster}",
        file="grouped_gemm_fp8.cu",
        entry="grouped_gemm_fp8",
        defines=(
            ("MASKED", str(int(layout is Layout.MASKED))),
            ("BLOCK_M", str(config.block_m)),
            ("STAGES", str(config.stages)),
            ("CLUSTER", str(config.cluster)),
            ("BOX_M", str(config.box_m)),
        ),
    )


VARIANTS = tuple((layout, config) for layout in Layout for config in CONFIGS)
