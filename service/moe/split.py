"""Which experts each rank of a parallel layer holds; imports no torch."""

from itertools import pairwise


def split_experts(held: range, num_ranks: int) -> list[range]:
    """The experts of each rank: contiguous parts of `held`, whose first len(held) % num_ranks have one more.

    held  the experts of the whole layer, `LayerShape.held_experts`

    Raises ValueError (name, expected, got) if a rank would hold none.
    """
    if not 1 <= num_ranks <= len(held):
        raise ValueError(f"num_ranks: expected 1 to {len(held)}, one expert for each, got {num_ranks}")
    each, more = divmod(len(held), num_ranks)
    starts = [held.start + rank * each + min(rank, more) for rank in range(num_ranks + 1)]
    return [range(*bounds) for bounds in pairwise(starts)]
