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


def test_all_ranks_find_the_same_experts_popular() -> None:
    popular = []
    for seed in range(3):
        torch.manual_seed(seed)
        popular.append(rank_tokens.draw_experts(5000, 16, 1, 1.5, "cpu").mode(dim=0).values.item())
    assert len(set(popular)) == 1


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


def test_sections_that_are_not_measured_keep_their_rows(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    parallel_options.write(file, {"ranks": 2}, {"rows": [1], "growth": [2]})
    parallel_options.write(file, {"ranks": 4}, {"growth": [3]})
    assert json.loads(file.read_text()) == {"about": {"ranks": 2}, "rows": [1], "growth": [3]}
    parallel_options.write(file, {"ranks": 4}, {"rows": [5]})
    assert json.loads(file.read_text()) == {"about": {"ranks": 4}, "rows": [5], "growth": [3]}
    parallel_options.write(None, {}, {})


ROW = {"layer": "l", "tokens": 1, "exchange_us": 10.0, "layer_us": 50.0, "one_gpu_us": 40.0}


def result(tmp_path: Path, gpus: int = 2, **sections: Any) -> Path:
    about = {"gpu": "GPU, 1.2, x\nGPU, 1.2, x", "nvrtc": "13.0", "torch": "2", "ranks": gpus}
    (tmp_path / f"parallel-{gpus}xh200.json").write_text(json.dumps({"about": about, **sections}))
    return tmp_path


def test_each_number_of_gpus_has_its_columns(tmp_path: Path) -> None:
    result(tmp_path, 4, rows=[ROW | {"gpus": 4, "layer_us": 60.0}, ROW | {"gpus": 4, "tokens": 16}])
    more = {"over_two_gemms": 2.0, "nccl_us": 30.0}
    result(tmp_path, 2, rows=[ROW | {"gpus": 2} | more])
    assert SECTIONS["parallel"](tmp_path).splitlines() == [
        "| layer | tokens a GPU | 2 GPUs: exchange | layer | 4 GPUs: exchange | layer |",
        "|---|---|---|---|---|---|",
        "| l | 1 | 10 | 50 | 10 | 60 |",
    ]
    assert SECTIONS["parallel-machine"](tmp_path) == (
        "2 and 4 GPUs of one host: GPU, driver 1.2, NVRTC 13.0, torch 2."
    )
    headline = SECTIONS["parallel-headline"](tmp_path).replace("\n", " ")
    assert "On 2 GPUs the whole layer takes 2.00 times as long as DeepGEMM's two GEMMs alone" in headline
    assert headline.endswith("An exchange by NCCL takes 3.00 to 3.00 times as long as ours.")


def test_routing_has_a_line_for_each_kind_and_number_of_gpus(tmp_path: Path) -> None:
    for gpus in (4, 2):
        row = ROW | {"gpus": gpus, "imbalance": 1.256, "layer_us": 10.0 * gpus, "one_gpu_us": 10.0}
        result(tmp_path, gpus, rows=[row], skewed=[row])
    assert SECTIONS["parallel-routing"](tmp_path).splitlines()[2:] == [
        f"| {drawn} | {gpus} | 1.26 to 1.26 | {gpus}.00 ({gpus}.00 to {gpus}.00) |"
        for drawn in ("even", "Zipf 1.0")
        for gpus in (2, 4)
    ]


def test_growth_is_that_from_one_gpu_to_the_most(tmp_path: Path) -> None:
    rows = [
        {"layer": "l", "tokens": tokens, "gpus": gpus, "layer_us": us}
        for tokens, gpus, us in ((1, 4, 30.0), (8, 4, 50.0), (1, 2, 20.0), (8, 2, 45.0), (1, 1, 10.0))
    ]
    text = SECTIONS["parallel-growth"](result(tmp_path, gpus=4, growth=rows))
    assert text == "On 4 GPUs a layer takes 3.00 to 3.00 times as long as on one."


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


def test_serving_with_several_gpus_is_shown_beside_one(tmp_path: Path) -> None:
    row = {"way": "http", "device": None, "tokens": 64, "callers": 1, "http_workers": 1, "p50_us": 900.0}
    many = row | {"callers": 4, "tokens_per_second": 1000.0}
    other = row | {"tokens": 16, "http_workers": 4}
    for name, factor in (("serving-1xh200.json", 1), ("serving-2xh200.json", 2)):
        rows = [row | {"p50_us": 900.0 / factor}, many | {"tokens_per_second": factor * 1500.0}, other]
        (tmp_path / name).write_text(json.dumps({"rows": rows}))
    assert SECTIONS["serving-ranks"](tmp_path).splitlines() == [
        "| way | tokens | 1 GPU | 2 GPUs | faster on 2 |",
        "|---|---|---|---|---|",
        "| HTTP | 64 | 900 | 450 | 2.00 |",
    ]
    assert SECTIONS["serving-ranks-callers"](tmp_path).splitlines()[2:] == [
        "| HTTP | 4 | 64 | 1500 | 3000 | 2.00 |"
    ]
