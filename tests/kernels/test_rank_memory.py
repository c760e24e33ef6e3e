"""What fits into the memory that ranks share."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertd.kernels.rank_memory import RankMemory

MEMORY: Any = SimpleNamespace(num_ranks=2, max_own_tokens=8, max_tokens=12)


@pytest.mark.parametrize("counts", [(8, 4), (0, 0), (6, 6)])
def test_tokens_that_fit(counts: tuple[int, ...]) -> None:
    RankMemory.check(MEMORY, counts)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((1, 1, 1), "counts: expected 2, got 3"),
        ((9, 0), "counts: expected at most 8 each, got 9"),
        ((8, 5), "counts: expected at most 12 in all, got 13"),
    ],
)
def test_tokens_without_room_are_refused(counts: tuple[int, ...], expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}$"):
        RankMemory.check(MEMORY, counts)


def test_hidden_sizes_that_threads_cannot_share_are_refused() -> None:
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    with pytest.raises(ValueError, match=r"^hidden_size: expected a multiple of 16, got 2888$"):
        RankMemory(group, torch.device("cpu"), 8, 12, 2888, 4, timeout=1.0)


def test_more_pairs_than_an_index_counts_are_refused() -> None:
    group: Any = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    expected = r"^max_own_tokens: expected at most 131071 with a top_k of 4, got 131072$"
    with pytest.raises(ValueError, match=expected):
        RankMemory(group, torch.device("cpu"), 131072, 262144, 2560, 4, timeout=1.0)
