"""The parts of benchmarks that need no GPU: shapes, pictures and command lines."""

import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import benchmarks.gemm.gemm_sweep
import benchmarks.gemm.grouped_gemm
import benchmarks.gemm.host_cost
import benchmarks.layer.layer_peers
import benchmarks.layer.moe_layer
import benchmarks.layer.numerics
import benchmarks.serving.stream_steps
from benchmarks import pictures
from benchmarks.__main__ import PACKAGES, main
from benchmarks.gemm.problem import Problem
from benchmarks.gemm.shapes import Shape, all_shapes
from benchmarks.layer.families import FAMILIES, make_family
from benchmarks.lib import cpus
from benchmarks.lib.run import Result, earlier
from benchmarks.report import SECTIONS
from benchmarks.serving import deadlines
from benchmarks.serving.open_loop import Outcome, summary
from benchmarks.serving.rows import Case, config, model_names
from benchmarks.serving.serving import KEYS
from expertd.layout import Layout
from expertd.service.moe.shape import LayerShape
from expertd.service.settings.loader import load_settings
from tests.kernels.helpers import random_contiguous, random_masked
from tests.paths import ROOT

RESULT = ROOT / "benchmarks" / "results" / "grouped_gemm-h200.json"


@pytest.mark.parametrize("name", PACKAGES)
def test_every_benchmark_can_be_imported_and_has_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", name, "--help"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m benchmarks {name} [-h]")


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["nothing"], 2), (["--json"], 2), (["--help"], 0)])
def test_without_a_benchmarks_name_all_are_listed(
    arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == code
    said = "".join(capsys.readouterr())
    assert "usage: python -m benchmarks [-h] NAME" in said
    if arguments in (["nothing"], ["--help"]):
        assert all(name in said for name in PACKAGES)


def test_shapes_depend_on_the_seed_alone() -> None:
    assert all_shapes(3) == all_shapes(3)
    assert all_shapes(3) != all_shapes(4)


def test_bytes_leave_out_groups_without_rows() -> None:
    shape = Shape("", Layout.CONTIGUOUS, (2, 0), 256, 128)
    weights, scales = 256 * 128, 2 * 4
    assert shape.bytes == weights + scales + 2 * (128 + 4 + 2 * 256)
    assert shape.flops == 2 * 2 * 256 * 128


def test_a_picture_shows_every_shape_twice(tmp_path: Path) -> None:
    pictures.draw_roofline(RESULT, tmp_path / "picture.svg")
    points = re.findall("<use ", (tmp_path / "picture.svg").read_text())
    assert len(points) >= 2 * len(json.loads(RESULT.read_text())["rows"])


def test_a_picture_names_its_result_and_is_reproducible(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        pictures.draw_roofline(RESULT, tmp_path / name)
    drawn = (tmp_path / "first.svg").read_text()
    assert pictures.digest(RESULT) in drawn
    assert drawn == (tmp_path / "second.svg").read_text()


def test_the_picture_of_speeds_has_a_bar_for_every_row(tmp_path: Path) -> None:
    result = RESULT.parent / "moe_layer_newest-h200.json"
    pictures.draw_speed(result, tmp_path / "picture.svg")
    drawn = (tmp_path / "picture.svg").read_text()
    for row in json.loads(result.read_text())["rows"]:
        assert f"<!-- {row['over_mega_moe']:.2f} -->" in drawn
        assert f"<!-- {row['layer']} -->" in drawn


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_rounding_errors_are_plausible(family: str) -> None:
    case = benchmarks.layer.numerics.make_case(make_family(family, LayerShape(256, 128, 8, 2)), 32)
    figures = benchmarks.layer.numerics.measure(case)
    assert 1 < figures["activated to FP8"] < figures["hidden states to FP8"] < 6
    steps = ("hidden states to FP8", "GEMM 1 to bf16", "activated to FP8", "GEMM 2 to bf16")
    together = sum(figures[step] ** 2 for step in steps) ** 0.5  # since they are independent
    assert figures["these four together"] == pytest.approx(together, rel=0.1)
    assert figures["expertd, Hopper's steps in PyTorch"] == pytest.approx(together, rel=0.1)
    assert figures["transformers, FP8 weights, its arithmetic"] == pytest.approx(together, rel=0.1)
    assert figures["expertd on a CPU"] < 1
    assert figures["transformers, bf16 weights, against these"] < 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize(
    "benchmark",
    [
        benchmarks.gemm.gemm_sweep, benchmarks.gemm.grouped_gemm, benchmarks.gemm.host_cost,
        benchmarks.layer.moe_layer, benchmarks.serving.stream_steps,
    ],
)  # fmt: skip
def test_a_missing_gpu_is_reported_in_a_sentence(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [benchmark.__name__])
    name = benchmark.__name__.rpartition(".")[2]
    with pytest.raises(SystemExit, match=f"benchmarks {name}: expected a Hopper GPU, got no CUDA device"):
        benchmark.main()


@pytest.mark.parametrize("shape", benchmarks.gemm.host_cost.SHAPES, ids=lambda shape: shape.label)
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.slow
def test_host_cost_takes_every_case(
    shape: Shape, given: bool, fresh: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(benchmarks.gemm.host_cost, "CALLS", 2)
    monkeypatch.setattr(benchmarks.gemm.host_cost, "BATCHES", 3)
    row = benchmarks.gemm.host_cost.measure(_on_the_cpu(shape), given, fresh)
    assert (row["shape"], row["out"]) == (shape.label, "given" if given else "allocated")
    assert 0 < row["min_us"] <= row["us"] <= row["max_us"]


def _on_the_cpu(shape: Shape) -> Problem:
    if shape.layout is Layout.CONTIGUOUS:
        packed = random_contiguous(shape.rows, shape.n, shape.k)
        out = torch.empty(sum(shape.rows), shape.n, dtype=torch.bfloat16)
        return Problem(shape, packed.a, packed.b, packed.offsets, out)
    masked = random_masked(shape.rows, shape.max_m, shape.n, shape.k)
    out = torch.empty(shape.num_groups, shape.max_m, shape.n, dtype=torch.bfloat16)
    return Problem(shape, masked.a, masked.b, masked.counts, out)


KERNELS = ("compute_permutation", "quantize_permute", "grouped_gemm", "grouped_gemm", "unpermute_rows")


def _call(start: float) -> list[tuple[str, float, float]]:
    """Overlapping kernels: each begins two us before the preceding one ends, and ends three us after that."""
    return [(name, start + 3 * i - 2 * (i > 0), start + 3 * i + 3) for i, name in enumerate(KERNELS)]


def test_a_stage_lasts_from_the_end_of_the_one_before() -> None:
    times = benchmarks.layer.moe_layer.stage_times([*_call(10), *_call(100)])
    assert times == [dict.fromkeys(benchmarks.layer.moe_layer.STAGES, 3)] * 2


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        (_call(0)[1:], "expected kernel compute_permutation for stage sort, got quantize_permute"),
        (_call(0)[:-1], "expected whole calls of 5 kernels, got 4 kernels"),
    ],
)
def test_unexpected_kernels_are_refused(kernels: list[tuple[str, float, float]], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        benchmarks.layer.moe_layer.stage_times(kernels)


def test_means_are_of_bands_of_tokens() -> None:
    ratios = {1: 1.0, 64: 4.0, 128: 99.0, 256: 2.0, 1024: 4.5, 2048: 99.0, 4096: 5.0}
    rows = [{"tokens": tokens, "ratio": ratio} for tokens, ratio in ratios.items()]
    expected = {"1 to 64": 2, "256 to 1024": 3, "4096": 5}
    assert benchmarks.layer.moe_layer.means(rows, "ratio") == pytest.approx(expected)
    assert benchmarks.layer.moe_layer.means(rows[:2], "ratio") == pytest.approx({"1 to 64": 2})


@pytest.mark.parametrize("peer", [{"two_gemms_us": 10.0}, {}])
def test_a_picture_shows_every_stage_of_every_row(peer: dict[str, float], tmp_path: Path) -> None:
    stages = dict.fromkeys(benchmarks.layer.moe_layer.STAGES, 2.0)
    rows = [{"layer": f"layer{n}", "tokens": n, "us": 10.0, "stages_us": stages} | peer for n in (1, 16, 64)]
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"about": {"gpu": "invented"}, "rows": rows}))
    pictures.draw_stages(result, tmp_path / "picture.svg")
    picture = (tmp_path / "picture.svg").read_text()
    for colour in pictures.COLOURS.values():
        assert picture.count(f"fill: {colour}") == 3 + 1  # plus one in the legend
    assert picture.count(f"stroke: {pictures.MARK}") == len(peer)
    said = "time over that of DeepGEMM's two GEMMs alone" if peer else "time over the whole layer's"
    assert f"<!-- {said} -->" in picture


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ({"two_gemms_us": 8.0, "mega_moe_us": 20.0}, {"over_two_gemms": 1.25, "over_mega_moe": 0.5}),
        ({"two_gemms_us": 8.0}, {"over_two_gemms": 1.25}),
        ({}, {}),
    ],
)
def test_ratios_are_over_the_available_peers(
    peers: dict[str, float], expected: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    row: dict[str, Any] = {"us": 10.0} | peers
    assert benchmarks.layer.moe_layer.ratios(row) == expected
    about = {"layer": "invented", "tokens": 1, "eager_us": 30.0, "stages_us": {"sort": 4.0}, "diff": 3e-4}
    benchmarks.layer.moe_layer.print_row(row | expected | about)
    line = capsys.readouterr().out
    assert ("two GEMMs     8.0 us x1.250" in line) == ("two_gemms_us" in peers)
    assert ("Mega MoE    20.0 us x0.500  diff 3.0e-04" in line) == ("mega_moe_us" in peers)


@pytest.mark.parametrize(("scale", "expected"), [(1, 0), (2, 0.2), (-1, 2), (float("nan"), float("nan"))])
def test_a_difference_is_0_for_equal_outputs_only(scale: float, expected: float) -> None:
    x = torch.tensor([[3.0, -4.0]], dtype=torch.bfloat16)
    assert benchmarks.layer.moe_layer.difference(x, scale * x) == pytest.approx(expected, nan_ok=True)


def test_a_difference_is_summed_in_float64() -> None:
    x = torch.ones(3, dtype=torch.float32)
    y = torch.tensor([1, 1, 1 + 2**-20], dtype=torch.float32)
    assert benchmarks.layer.moe_layer.difference(x, y) == pytest.approx(2**-40 / 6, rel=1e-3)


@pytest.mark.parametrize("is_common", [True, False])
@pytest.mark.parametrize("mega_moe", [True, False])
@pytest.mark.parametrize("with_peer", [True, False])
def test_a_row_has_the_columns_of_the_available_peers(
    with_peer: bool, mega_moe: bool, is_common: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = torch.ones(16, 4)
    problem: Any = SimpleNamespace(
        layer=SimpleNamespace(name="invented", is_common=is_common),
        hidden_states=out,
        topk_ids=torch.arange(32).reshape(16, 2) % 5,
        out=out.clone(),
        run=lambda: out,
    )
    monkeypatch.setattr(benchmarks.layer.moe_layer, "graph_of", lambda call: call)
    monkeypatch.setattr(benchmarks.layer.moe_layer, "_stages", lambda call: {})
    monkeypatch.setattr(
        benchmarks.layer.moe_layer, "microseconds", lambda calls: [10.0, 30.0, 8.0, 20.0][: len(calls)]
    )
    monkeypatch.setattr(benchmarks.layer.layer_peers, "has_mega_moe", lambda: mega_moe)
    monkeypatch.setattr(benchmarks.layer.layer_peers, "two_gemms", lambda problem: lambda: None)
    monkeypatch.setattr(benchmarks.layer.layer_peers, "mega_moe", lambda problem: lambda: 2 * out)
    expected = {"layer": "invented", "tokens": 16, "us": 10.0, "eager_us": 30.0, "stages_us": {}}
    expected["activated_experts"] = 5
    if with_peer:
        expected |= {"two_gemms_us": 8.0, "over_two_gemms": 1.25}
    if with_peer and mega_moe and is_common:
        expected |= {"mega_moe_us": 20.0, "over_mega_moe": 0.5, "diff": pytest.approx(0.2)}
    assert benchmarks.layer.moe_layer.measure(problem, with_peer) == expected


def test_the_command_line_selects_layers_and_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.layer.moe_layer"])
    assert vars(benchmarks.layer.moe_layer._options()) == {
        "layer": "", "tokens": (1, 16, 64, 256, 1024, 4096), "json": None,
        "no_peer": False, "no_router": False, "models": False, "peers": False,
    }  # fmt: skip
    arguments = [
        "--models",
        "--layer",
        "qwen3",
        "--tokens",
        "2",
        "300",
        "--json",
        "x.json",
        "--no-peer",
        "--no-router",
        "--peers",
    ]
    monkeypatch.setattr("sys.argv", ["benchmarks.layer.moe_layer", *arguments])
    assert vars(benchmarks.layer.moe_layer._options()) == {
        "layer": "qwen3", "tokens": [2, 300], "json": Path("x.json"), "no_peer": True, "no_router": True,
        "models": True, "peers": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "16", "0"], "--tokens: expected numbers of at least 1, got 0"),
        (["--layer", "gpt"], "--layer: expected a part of deepseek-v3/ep8, .*, got 'gpt'"),
        (["--models", "--layer", "v3"], "--layer: expected a part of gpt-oss-120b, .*, got 'v3'"),
    ],
)
def test_invalid_layers_and_tokens_are_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks.layer.moe_layer", *arguments])
    with pytest.raises(SystemExit, match=message):
        benchmarks.layer.moe_layer.main()


def test_a_server_of_several_layers_is_well_configured(tmp_path: Path) -> None:
    file = tmp_path / "serving.yaml"
    file.write_text(config(58, str(tmp_path)))
    settings = load_settings(file)
    assert [model.name for model in settings.models] == model_names(58)
    assert len({model.shape for model in settings.models}) == 1


def test_a_server_has_its_cpus_and_callers_have_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[int]] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5, 8, 9})
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cpus: given.append(cpus))
    assert cpus.split(None)[0] is None
    assert not given
    of_server, header = cpus.split(2)
    assert (of_server, given) == ({3, 5}, [[8, 9]])
    assert "2 cores of an" in (text := cpus.described(header))
    assert text.endswith("for the server, and 2 others for its callers")
    with pytest.raises(SystemExit, match="--server-cpus: expected 1 to 3, got 4"):
        cpus.split(4)


def test_rows_of_serving_replace_those_of_the_same_case(tmp_path: Path) -> None:
    one, more = Case("channel", None, 4096), Case("channel", None, 4096, 4)
    old = {"http_workers": 1, **one._asdict(), "p50_us": 1.0}
    del old["layers"]  # as before there were several
    file = tmp_path / "rows.json"
    assert earlier(file) == earlier(None) == []
    file.write_text(json.dumps({"rows": [old]}))
    result = Result(file, {}, earlier(file), KEYS, Case._field_defaults)
    result.put({"http_workers": 1, **more._asdict(), "p50_us": 2.0})
    result.put({"http_workers": 1, **one._asdict(), "p50_us": 3.0})
    assert [row["p50_us"] for row in earlier(file)] == [3.0, 2.0], "in the file at once"


@pytest.mark.slow
def test_late_answers_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "deadlines-cpu.json"
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(deadlines, "CASES", ((1, 64),))
    assert deadlines.main(["--timeout", "5000", "0.001", "--seconds", "0.5", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed == SECTIONS["timeouts"](tmp_path) + "\n"
    *_, patient, hasty = printed.splitlines()
    assert re.fullmatch(r"\| 5000 \| 1 x 64 \| [1-9]\d* \| 0 \| - \| - \| - \| \d+ \|", patient)
    assert re.fullmatch(r"\| 0\.001 \| 1 x 64 \| 0 \| [1-9]\d*( \| \d+\.\d){3} \| \d+ \|", hasty)


def test_a_late_request_says_where_its_time_was() -> None:
    good, late = Outcome("output", 0.1, 0.01, 0.08), Outcome("output", 0.3, 0.002, 0.25)
    row = summary(2.0, 10.0, 1.0, 0.2, [good, late, Outcome("refused", 0.1, 0.0, 0.0)])
    assert (row["sent"], row["refused"], row["late"]) == (3, 1, 1)
    assert row["late_requests"] == [{"kind": "output", "seconds_ms": 300, "sent_ms": 2, "server_ms": 250}]
