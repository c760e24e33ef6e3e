"""Which experts each rank holds."""

import re

import pytest

from expertd.service.moe.split import experts_of_rank


@pytest.mark.parametrize(
    ("held", "num_ranks", "expected"),
    [
        (range(8), 1, [range(8)]),
        (range(8), 4, [range(2), range(2, 4), range(4, 6), range(6, 8)]),
        (range(10), 4, [range(3), range(3, 6), range(6, 8), range(8, 10)]),
        (range(5, 8), 3, [range(5, 6), range(6, 7), range(7, 8)]),
    ],
)
def test_the_first_ranks_have_one_more(held: range, num_ranks: int, expected: list[range]) -> None:
    assert [experts_of_rank(held, rank, num_ranks) for rank in range(num_ranks)] == expected


@pytest.mark.parametrize("num_ranks", [0, 4])
def test_each_rank_must_hold_an_expert(num_ranks: int) -> None:
    expected = f"num_ranks: expected 1 to 3, one expert for each, got {num_ranks}"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        experts_of_rank(range(4, 7), 0, num_ranks)
