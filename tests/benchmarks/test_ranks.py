"""The parts of `benchmarks parallel` that need no GPU: routing, NCCL's exchange over gloo, files, tables."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.layer.problem import LAYERS, Layer, LayerProblem
from benchmarks.ranks import parallel_options, rank_tokens
from benchmarks.ranks.nccl_peer import NcclExchange
from benchmarks.ranks.rank_timing import Ranks
from benchmarks.ranks.report import link_microseconds, other_ranks
from benchmarks.report import SECTIONS
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


def problem(num_tokens: int) -> LayerProblem:
    hidden_states = torch.randn(num_tokens, 128)
    weights: Any = SimpleNamespace()
    nothing = torch.empty(0)
    layer = Layer("invented", 128, 128, EXPERTS, TOP_K)
    return LayerProblem(layer, weights, hidden_states, nothing, nothing, torch.empty_like(hidden_states))


def test_same_work_has_the_pairs_of_one_rank() -> None:
    every = [
        torch.tensor([[0, 5, 4], [7, 1, 2]]),
        torch.empty(0, 3, dtype=torch.int64),
        torch.tensor([[4, 9, 3]]),
    ]
    assert rank_tokens.imbalance(every, EXPERTS) == pytest.approx(4 / 3)
    same = rank_tokens.same_work(problem(2), every, 1)
    assert same.topk_ids.tolist() == [[1, 0, 3], [0, -1, -1]]
    assert same.hidden_states.shape == (2, 128)
    assert rank_tokens.same_work(problem(2), every[1:2], 0).topk_ids.tolist() == [[0, -1, -1]]


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


ROW = {"layer": "l", "tokens": 1, "exchange_us": 10.0, "layer_us": 50.0, "one_gpu_us": 40.0}


def result(tmp_path: Path, gpus: int = 2, **sections: Any) -> Path:
    about = {"gpu": "GPU, 1.2, x\nGPU, 1.2, x", "nvrtc": "13.0", "torch": "2", "ranks": gpus}
    (tmp_path / f"parallel-{gpus}xh200.json").write_text(json.dumps({"about": about, **sections}))
    return tmp_path


def test_a_token_goes_to_each_other_rank_at_most_once() -> None:
    assert other_ranks(2, 8) == pytest.approx(1 - 2**-8)
    assert other_ranks(8, 1) == pytest.approx(7 / 8)
    assert other_ranks(8, 1000) == pytest.approx(7)
    there, back = link_microseconds(4096, 2)
    assert (round(there), round(back)) == (82, 158)


def test_more_gpus_take_what_was_measured_and_the_links_time(tmp_path: Path) -> None:
    name = LAYERS[0].name
    rows = [
        ROW | {"layer": name, "tokens": tokens, "one_gpu_us": alone, "layer_us": alone + 10}
        for tokens, alone in ((1, 100.0), (128, 400.0), (1024, 800.0), (4096, 2700.0))
    ]
    text = SECTIONS["parallel-expected"](result(tmp_path, rows=rows))
    text = text.replace("\n", " ")
    assert text.startswith(
        "With 128, 1024 and 4096 tokens a GPU: on 8 GPUs 447, 1106 and 3895 µs, of which the "
    )
    assert text.endswith(
        "on 2 GPUs 417, 870 and 2950 µs, of which the link 7, 60 and 240 (measured 410, 810 and 2710)."
    )
