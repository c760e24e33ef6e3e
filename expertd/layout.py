"""How the rows of a grouped GEMM are laid out."""

from enum import StrEnum


class Layout(StrEnum):
    """Sorted by group without padding, or [groups, max_m] with a count for each group."""

    CONTIGUOUS = "contiguous"
    MASKED = "masked"

    __hash__ = str.__hash__  # Enum's is slower, and every launch looks up by it
