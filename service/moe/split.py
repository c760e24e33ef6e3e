"""How rows and experts are split over ranks; imports no torch."""

from collections.abc import Sequence


def part_of(total: int, rank: int, num_ranks: int) -> range:
    """A rank's part of `total` rows or experts, in order; the first ranks have one more if need be."""
    size, more = divmod(total, num_ranks)
    start = rank * size + min(rank, more)
    return range(start, start + size + (rank < more))


def parts_of(total: int, num_ranks: int) -> list[range]:
    """The `part_of` each rank."""
    return [part_of(total, rank, num_ranks) for rank in range(num_ranks)]


def experts_of_rank(physical: Sequence[int], rank: int, num_ranks: int) -> Sequence[int]:
    """The experts that a rank holds: its `part_of` all ranks' physical experts.

    physical  the expert of each; without replicas `LayerShape.held_experts`

    Raises ValueError (name, expected, got) if a rank would hold none.
    """
    if not 1 <= num_ranks <= len(physical):
        raise ValueError(f"num_ranks: expected 1 to {len(physical)}, one expert for each, got {num_ranks}")
    part = part_of(len(physical), rank, num_ranks)
    return physical[part.start : part.stop]
