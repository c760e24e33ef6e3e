"""The formats in which experts' weights stay in memory. Does not import torch."""

from dataclasses import dataclass
from enum import StrEnum

from expertd.limits import SCALE_BLOCK


class WeightFormat(StrEnum):
    """FP8 has a scale per 128x128 block, the others, of four bits, one per group of columns of a row."""

    FP8 = "FP8"
    MXFP4 = "MXFP4"
    INT4 = "INT4"
    NVFP4 = "NVFP4"

    __hash__ = str.__hash__  # faster than Enum's; checks of every call hash it

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Columns that a scale may stand for."""
        return _GROUP_SIZES[self]


_GROUP_SIZES = {
    WeightFormat.FP8: (SCALE_BLOCK,),
    WeightFormat.MXFP4: (32,),
    WeightFormat.INT4: (32, 128),
    WeightFormat.NVFP4: (16,),
}
_SCALE_BYTES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}
PACKED_SCALE_BYTES = {WeightFormat.MXFP4: 1, WeightFormat.INT4: 2, WeightFormat.NVFP4: 1}
"""Of a scale of four bits as the backend hopper packs them."""


@dataclass(frozen=True)
class WeightLayout:
    """How matrices [n, k] lie in memory.

    group_size  columns that a scale stands for; FP8: rows, too
    scales      the dtype of scales, with safetensors' name
    is_packed   four bits as the backend hopper packs them (kernels/backends/hopper/packed_weights.py)
    """

    format: WeightFormat = WeightFormat.FP8
    group_size: int = SCALE_BLOCK
    scales: str = "F32"
    is_packed: bool = False

    @property
    def has_whole(self) -> bool:
        """Whether a row has a scale of its scales."""
        return self.format is WeightFormat.NVFP4

    def data_bytes(self, n: int, k: int) -> int:
        """Bytes of the values of a matrix."""
        return n * k if self.format is WeightFormat.FP8 else n * k // 2

    def scale_shape(self, n: int, k: int) -> tuple[int, int]:
        """The shape of the scales of a matrix."""
        is_fp8 = self.format is WeightFormat.FP8
        return -(-n // SCALE_BLOCK) if is_fp8 else n, -(-k // self.group_size)

    def num_bytes(self, n: int, k: int, pairs: bool = False) -> int:
        """Bytes of a matrix, scales included.

        pairs  its rows are gates and the matching ups; packed, a block of each shares MXFP4's scale
        """
        if self.is_packed:
            return self._packed_bytes(n, k, pairs)
        rows, columns = self.scale_shape(n, k)
        scales = rows * columns * _SCALE_BYTES[self.scales]
        return self.data_bytes(n, k) + scales + (4 * n if self.has_whole else 0)

    def _packed_bytes(self, n: int, k: int, pairs: bool) -> int:
        blocks_n, blocks_k = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
        row = SCALE_BLOCK // 2 + SCALE_BLOCK // self.group_size * PACKED_SCALE_BYTES[self.format]
        of_rows = 4 * SCALE_BLOCK * blocks_n
        of_blocks = 4 * (-(-n // 2 // SCALE_BLOCK) if pairs else blocks_n) * blocks_k
        scales = of_blocks if self.format is WeightFormat.MXFP4 else of_rows
        return blocks_n * blocks_k * SCALE_BLOCK * row + scales


FP8_BLOCKS = WeightLayout()
