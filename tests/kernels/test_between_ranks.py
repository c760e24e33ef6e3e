"""Between ranks: what fits into their memory, and grids, of which every CTA runs at once or has a token."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertd.kernels.backends.hopper import rank_grids
from expertd.kernels.rank_memory import RankMemory


@pytest.fixture(autouse=True)
def sms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_grids, "multiprocessors", lambda device, num_sms: num_sms or 132)


def ctas(num_sms: int | None, per_sm: int, tokens: list[int], columns: int) -> int:
    on: Any = SimpleNamespace(device=0)
    return rank_grids.ctas(on, num_sms, per_sm, tokens, columns)


@pytest.mark.parametrize(
    ("num_sms", "per_sm", "tokens", "columns", "expected"),
    [
        (None, 4, [1, 0], 7168, 2 * 4),  # a part of a token for each rank, also one without the token
        (None, 4, [0, 0], 2048, 1),
        (None, 4, [33, 66], 7168, 2 * 66 * 4),  # exactly as many as run at once
        (None, 4, [33, 67], 7168, 528),
        (None, 3, [1000, 1000], 2304, 396),
        (None, 1, [1000, 1000], 6144, 132),
        (20, 4, [4096] * 8, 6144, 78),  # of 80, whole rows of 3 parts
        (2, 3, [9, 9], 16384, 8),  # fewer SMs than a row has parts
    ],
)
def test_ctas_are_whole_rows_that_run_at_once(
    num_sms: int | None, per_sm: int, tokens: list[int], columns: int, expected: int
) -> None:
    assert ctas(num_sms, per_sm, tokens, columns) == expected


@pytest.mark.parametrize(
    ("num_ctas", "tokens", "columns", "expected"),
    [
        (2 * 4, [1, 0], 7168, 2),  # a CTA for each part of a token and each rank
        (528, [33, 66], 7168, 2),
        (528, [67, 67, 67, 67], 7168, 1),  # 132 CTAs for the same columns, fewer than two for each token
        (528, [33, 33, 33, 33], 7168, 4),
        (528, [20, 20, 20, 20], 7168, 4),  # no more than there are ranks
        (396, [1000, 1000], 2304, 1),
        (1, [0, 0], 2048, 1),
    ],
)
def test_ctas_without_a_token_share_those_of_others(
    num_ctas: int, tokens: list[int], columns: int, expected: int
) -> None:
    assert rank_grids.ctas_per_token(num_ctas, tokens, columns) == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_sms", [1, 20, 112, 132])
def test_ctas_that_share_a_token_have_one_only(num_ranks: int, num_sms: int) -> None:
    """Of those with more, each takes its next one from a counter, so nobody may share it."""
    shared = 0
    for most in [*range(200), 1024, 4096]:
        tokens = [most] * num_ranks
        num_ctas = ctas(num_sms, 4, tokens, 7168)
        share = rank_grids.ctas_per_token(num_ctas, tokens, 7168)
        shared += share > 1
        assert share == 1 or num_ctas // 4 // share >= most
    assert (shared > 0) is (num_ranks > 1 and num_sms > 1)


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
