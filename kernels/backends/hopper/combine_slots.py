"""Launches csrc/combine_slots.cu: as `combine_rows`, for memory that is `exact`."""

import functools

from expertd.kernels.backends.hopper.combine_rows import combine
from expertd.kernels.backends.hopper.launch import variants_by_dtype
from expertd.kernels.backends.hopper.rank_grids import place_bytes

_BY_DTYPE = variants_by_dtype("combine_slots", 256, place_bytes)
_CTAS = 3  # per SM at most: as many as run at once

VARIANTS = tuple(_BY_DTYPE.values())

combine_slots = functools.partial(combine, _BY_DTYPE, _CTAS)
