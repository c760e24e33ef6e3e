"""The parts of `benchmarks parallel` that need no GPU: routing, NCCL's exchange over gloo, files, tables."""

import pytest
import torch
import torch.distributed as dist

from benchmarks.ranks import parallel_options, rank_tokens
from benchmarks.ranks.nccl_peer import NcclExchange
from benchmarks.ranks.rank_timing import Ranks
from expertd.service.moe.parallel import TorchExchange
from tests.service.moe.parallel.ranks import ranks_of

COUNTS = (5, 0, 3)
EXPERTS, TOP_K = 4, 3  # of each rank, of a token


def test_experts_are_drawn_without_repetition_and_by_the_law() -> None:
    torch.manual_seed(0)
    for zipf in (0.0, 1.0):
        ids = rank_tokens.draw_experts(20000, 16, 4, zipf, "cpu")
        assert ids.dtype == torch.int32
        assert ids.shape == (20000, 4)
        assert (ids.sort(dim=1).values.diff(dim=1) > 0).all(), "different experts"
        first = torch.bincount(ids[:, 0], minlength=16).sort(descending=True).values / len(ids)
        weights = torch.arange(1, 17) ** -zipf
        assert torch.allclose(first, weights / weights.sum(), atol=0.02)


def exchanged(exchange: TorchExchange) -> tuple[bool, list[list[list[int]]]]:
    """Whether NCCL's exchange, here over gloo, adds up what came back; and all ranks' experts."""
    assert dist.group.WORLD is not None
    ranks = Ranks(dist.group.WORLD, lambda: None)
    torch.manual_seed(exchange.rank)
    count = COUNTS[exchange.rank]
    ids = rank_tokens.draw_experts(count, len(COUNTS) * EXPERTS, TOP_K, 0.0, "cpu")
    hidden_states = torch.randn(count, 128)
    peer = NcclExchange(hidden_states, ids, EXPERTS, ranks)
    owners = torch.tensor([len(set(row)) for row in (ids // EXPERTS).tolist()]).view(-1, 1)
    same = True
    for times in (1, 1, 3):
        peer.out.fill_(torch.nan)
        peer(times)
        same &= torch.allclose(peer.out, owners**times * hidden_states)
    every = rank_tokens.all_experts(ids, COUNTS, ranks)
    assert every[exchange.rank].equal(ids)
    return same, [each.tolist() for each in every]


@pytest.mark.slow
def test_nccls_exchange_sends_every_token_to_each_rank_once() -> None:
    group = tuple(range(len(COUNTS)))
    with ranks_of(len(COUNTS), [group], timeout_seconds=20) as ranks:
        results = ranks.run(group, exchanged)
    assert all(same for same, _ in results)
    assert all(every == results[0][1] for _, every in results)
    assert [len(ids) for ids in results[0][1]] == list(COUNTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "16", "0"], "--tokens: expected numbers of at least 1, got 0"),
        (["--layer", "gpt"], "--layer: expected a part of deepseek-v3/ep8, .*, got 'gpt'"),
        (["--ranks", "9"], "--ranks: expected 1 to 8, got 9"),
        (["--zipf", "-1"], "--zipf: expected at least 0, got -1"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        parallel_options.options(arguments)
