"""How rows and experts are split over ranks; imports no torch."""


def part_of(total: int, rank: int, num_ranks: int) -> range:
    """A rank's part of `total` rows or experts, in order; the first ranks have one more if need be."""
    size, more = divmod(total, num_ranks)
    start = rank * size + min(rank, more)
    return range(start, start + size + (rank < more))


def parts_of(total: int, num_ranks: int) -> list[range]:
    """The `part_of` each rank."""
    return [part_of(total, rank, num_ranks) for rank in range(num_ranks)]


def split_experts(held: range, num_ranks: int) -> list[range]:
    """The experts of each rank: its `part_of` those held.

    held  the experts of the whole layer, `LayerShape.held_experts`

    Raises ValueError (name, expected, got) if a rank would hold none.
    """
    if not 1 <= num_ranks <= len(held):
        raise ValueError(f"num_ranks: expected 1 to {len(held)}, one expert for each, got {num_ranks}")
    return [held[part.start : part.stop] for part in parts_of(len(held), num_ranks)]
