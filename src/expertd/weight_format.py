"""The formats in which experts' weights stay in memory."""

from enum import StrEnum


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
    WeightFormat.FP8: (128,),
    WeightFormat.MXFP4: (32,),
    WeightFormat.INT4: (32, 128),
    WeightFormat.NVFP4: (16,),
}
