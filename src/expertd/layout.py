"""The layout of the rows of a grouped GEMM."""

from enum import StrEnum


class Layout(StrEnum):
    """Contiguous: rows sorted by group, without padding. Masked: [groups, max_m] with a count per group."""

    CONTIGUOUS = "contiguous"
    MASKED = "masked"

    __hash__ = str.__hash__  # faster than Enum's; every launch hashes it
