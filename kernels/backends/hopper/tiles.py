"""The tiles of the grouped GEMM: the closed list of configurations. plans.py chooses one."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from expertd.limits import SCALE_BLOCK
from expertd.weight_format import PACKED_SCALE_BYTES, WeightFormat

BLOCK_N = SCALE_BLOCK  # unless configured otherwise: a K block then needs one scale of b
BLOCK_K = SCALE_BLOCK


@dataclass(frozen=True, eq=False)  # one instance per configuration, used as a dictionary key by every launch
class TileConfig:
    """Compile-time parameters.

    swap_ab   b on the tensor cores' M side and a on the N side (tile heights in steps of 16, not 64)
    block_m   rows of a in a CTA's tile, at most
    stages    K blocks of both operands in flight
    cluster   CTAs with neighboring columns that load the rows of a together
    box_m     rows of a per TMA load
    swiglu    out is silu(gate) * up in FP8 with scales; b has the gate rows first, then the up rows
    block_n   rows of b in a CTA's tile; with swiglu, half of them gates
    other_glu with swiglu: biases, and another gated activation than silu(gate) * up
    ctas      CTAs per SM
    weights   the format of b; four bits only with swap_ab, and b packed as in packed_weights.py
    group     columns of b that share a scale
    """

    swap_ab: bool
    block_m: int
    stages: int
    cluster: int
    box_m: int
    swiglu: bool = False
    block_n: int = BLOCK_N
    other_glu: bool = False
    ctas: int = 1
    weights: WeightFormat = WeightFormat.FP8
    group: int = SCALE_BLOCK

    @property
    def name(self) -> str:
        """The name of its variants: short, and unique within a layout."""
        swap_ab = "swap_ab_" if self.swap_ab else ""
        if self.weights is not WeightFormat.FP8:
            group = f"g{self.group}_" if len(self.weights.group_sizes) > 1 else ""
            swap_ab = f"{self.weights.lower()}_{group}"
        cluster = f"_cluster{self.cluster}" if self.cluster > 1 else ""
        columns = f"n{self.block_n}" if self.block_n != BLOCK_N else ""
        activation = "_glu" if self.other_glu else "_swiglu" if self.swiglu else ""
        ctas = f"_x{self.ctas}" if self.ctas > 1 else ""
        return f"{swap_ab}m{self.block_m}{columns}{cluster}{activation}{ctas}"

    @property
    def epilogue(self) -> str:
        """The type in csrc/ that stores its results."""
        if self.swiglu:
            swap_ab = "SwapAb" if self.swap_ab else ""
            return f"{swap_ab}GluEpilogue<{'OtherGlu' if self.other_glu else 'Swiglu'}>"
        return "SwapAbEpilogue" if self.swap_ab else "Bf16Epilogue"

    @property
    def out_block_n(self) -> int:
        """Columns of out in a CTA's tile, and rows of b per TMA load."""
        return self.block_n // 2 if self.swiglu else self.block_n

    @property
    def block_bytes(self) -> int:
        """Bytes of a tile's K block of b: as many for each format as its rows and groups of columns take."""
        if self.weights is WeightFormat.FP8:
            return self.block_n * BLOCK_K
        return self.block_n * (BLOCK_K // 2 + BLOCK_K // self.group * PACKED_SCALE_BYTES[self.weights])

    @property
    def threads(self) -> int:
        """Threads per CTA: a producer warpgroup, and a consumer warpgroup for every 64 rows on the M side."""
        return 128 * (1 + (2 if self.swap_ab else self.block_m // 64))

    @property
    def storage_bytes(self) -> int:
        """Size of SharedStorage in csrc/pipeline.cuh, which asserts it."""
        groups = self.threads // 128 - 1
        glu = self.swiglu and not self.swap_ab
        scales = self.block_m * 4 * (2 if glu or SCALE_BLOCK % self.block_n else 1)
        stage = self.block_bytes + self.block_m * BLOCK_K + scales + 2 * 8
        staging = groups * (4096 if self.swap_ab or self.swiglu else 64 * -(-self.block_n // 64) * 64 * 2)
        exchange = 2 * 4 * groups * (64 + 8) if glu else 0
        biases = 4 * groups * 256 if self.other_glu and glu else 0
        if self.swiglu and not glu:
            staging, exchange = self.block_m * 64, 2 * (2 * 4 * self.block_m + 8)
        tiles = (self.stages + 3) * (16 + 8)  # kTiles records, each with its barrier
        return -(-(self.stages * stage + staging + biases + exchange + tiles) // 16) * 16

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


# Few rows per group: weights stream once through a deep ring. Many: warpgroups of 64 rows each; with enough
# work for many waves, two CTAs load the rows of a together. The others are mostly for few groups.
SWAP_AB = TileConfig(swap_ab=True, block_m=64, stages=8, cluster=1, box_m=16)
NORMAL = TileConfig(swap_ab=False, block_m=192, stages=4, cluster=1, box_m=64)
NORMAL_CLUSTER2 = TileConfig(swap_ab=False, block_m=192, stages=4, cluster=2, box_m=32)
LARGE = TileConfig(swap_ab=False, block_m=128, stages=3, cluster=1, box_m=64, block_n=256)
WIDE = TileConfig(swap_ab=False, block_m=128, stages=4, cluster=1, box_m=64, block_n=192)
MIDDLE = TileConfig(swap_ab=False, block_m=128, stages=6, cluster=1, box_m=64, block_n=96)
SHORT = TileConfig(swap_ab=False, block_m=64, stages=8, cluster=1, box_m=32)
NARROW = TileConfig(swap_ab=False, block_m=64, stages=13, cluster=1, box_m=32, block_n=64)
NARROWEST = TileConfig(swap_ab=False, block_m=64, stages=17, cluster=1, box_m=32, block_n=32)
# Few rows on few SMs: while one CTA waits for a K block, the SM's other one multiplies.
SWAP_AB_TWICE = TileConfig(swap_ab=True, block_m=32, stages=5, cluster=1, box_m=16, ctas=2)
CONFIGS = (SWAP_AB, SWAP_AB_TWICE, NORMAL, NORMAL_CLUSTER2, LARGE, WIDE, MIDDLE, SHORT, NARROW, NARROWEST)
# With SwiGLU: a scale of the result covers 128 columns, 64 from each CTA of a pair.
SWIGLU = TileConfig(swap_ab=False, block_m=192, stages=4, cluster=2, box_m=32, swiglu=True)
SWIGLU_FEW = TileConfig(swap_ab=False, block_m=64, stages=8, cluster=2, box_m=16, swiglu=True)
SWIGLU_FEW_TWICE = replace(SWIGLU_FEW, stages=4, ctas=2)
# The same with biases or another activation.
GLU, GLU_FEW, GLU_FEW_TWICE = (
    replace(config, other_glu=True) for config in (SWIGLU, SWIGLU_FEW, SWIGLU_FEW_TWICE)
)


class FourBitTiles(NamedTuple):
    """The tiles for weights of one format of four bits: of each two, one for few rows and one for more.

    plain      without an activation
    swiglu     with SwiGLU
    other_glu  with biases or another activation
    """

    plain: tuple[TileConfig, TileConfig]
    swiglu: tuple[TileConfig, TileConfig]
    other_glu: tuple[TileConfig, TileConfig]


def _four_bits(weights: WeightFormat, group: int, is_tall: bool) -> FourBitTiles:
    """is_tall: with a tile of 128 rows for more than few rows; else there is but one."""
    few = TileConfig(True, 64, stages=12, cluster=1, box_m=16, weights=weights, group=group)
    swiglu_few = replace(few, cluster=2, swiglu=True)
    glu_few = replace(swiglu_few, other_glu=True)
    if not is_tall:
        return FourBitTiles((few, few), (swiglu_few, swiglu_few), (glu_few, glu_few))
    many = replace(few, block_m=128, stages=8, cluster=2)
    swiglu = replace(many, swiglu=True)
    return FourBitTiles((few, many), (swiglu_few, swiglu), (glu_few, replace(swiglu, other_glu=True)))


# Weights of four bits take half the room, so more K blocks are in flight. With many rows, two CTAs load the
# rows together; with an activation, such a pair has the 128 columns of a scale. Where a K block is several
# products, there are registers for 64 rows.
FOUR_BITS = {
    (WeightFormat.MXFP4, 32): _four_bits(WeightFormat.MXFP4, 32, is_tall=True),
    (WeightFormat.INT4, 128): _four_bits(WeightFormat.INT4, 128, is_tall=True),
    (WeightFormat.INT4, 32): _four_bits(WeightFormat.INT4, 32, is_tall=False),
    (WeightFormat.NVFP4, 16): _four_bits(WeightFormat.NVFP4, 16, is_tall=False),
}
"""By format, and by the columns that share a scale."""
MXFP4_CONFIGS = MXFP4_FEW, MXFP4 = FOUR_BITS[WeightFormat.MXFP4, 32].plain
MXFP4_SWIGLU_FEW, MXFP4_SWIGLU = FOUR_BITS[WeightFormat.MXFP4, 32].swiglu
MXFP4_GLU_FEW, MXFP4_GLU = FOUR_BITS[WeightFormat.MXFP4, 32].other_glu
