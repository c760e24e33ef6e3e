"""The parts of benchmarks that need no GPU: shapes, pictures and command lines."""

import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import benchmarks.gemm.gemm_sweep
import benchmarks.gemm.grouped_gemm
import benchmarks.gemm.host_cost
import benchmarks.layer.layer_peers
import benchmarks.layer.moe_layer
import benchmarks.layer.numerics
import benchmarks.ranks.parallel
import benchmarks.serving.serving
import benchmarks.serving.steps
import benchmarks.serving.stream_steps
from benchmarks.__main__ import PACKAGES, main
from benchmarks.gemm.shapes import Shape
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
from tests.paths import ROOT


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


def test_bytes_leave_out_groups_without_rows() -> None:
    shape = Shape("", Layout.CONTIGUOUS, (2, 0), 256, 128)
    weights, scales = 256 * 128, 2 * 4
    assert shape.bytes == weights + scales + 2 * (128 + 4 + 2 * 256)
    assert shape.flops == 2 * 2 * 256 * 128


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
        benchmarks.layer.moe_layer, benchmarks.ranks.parallel, benchmarks.serving.serving,
        benchmarks.serving.steps, benchmarks.serving.stream_steps,
    ],
)  # fmt: skip
def test_a_missing_gpu_is_reported_in_a_sentence(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [benchmark.__name__])
    name = benchmark.__name__.rpartition(".")[2]
    with pytest.raises(SystemExit, match=f"benchmarks {name}: expected a Hopper GPU, got no CUDA device"):
        benchmark.main()


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


@pytest.mark.parametrize(("scale", "expected"), [(1, 0), (2, 0.2), (-1, 2), (float("nan"), float("nan"))])
def test_a_difference_is_0_for_equal_outputs_only(scale: float, expected: float) -> None:
    x = torch.tensor([[3.0, -4.0]], dtype=torch.bfloat16)
    assert benchmarks.layer.moe_layer.difference(x, scale * x) == pytest.approx(expected, nan_ok=True)


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


def test_rows_are_printed_and_in_the_file_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Result(tmp_path / "result.json", {"gpu": "invented"})
    row = {"layer": "l", "us": 12.3456, "stages_us": {"sort": 1.0, "of": [2.5, None]}}
    result.put(row)
    assert json.loads((tmp_path / "result.json").read_text()) == {"about": {"gpu": "invented"}, "rows": [row]}
    printed = capsys.readouterr().out.splitlines()
    assert printed == ["gpu invented", "layer l  us 12.35  stages_us (sort 1, of [2.5, None])"]


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
    *_, patient, hasty = printed.splitlines()
    shown = ["|".join([*line.split("|")[:5], line.split("|")[7], ""]) for line in (patient, hasty)]
    assert SECTIONS["timeouts"](tmp_path).splitlines()[2:] == shown
    assert re.fullmatch(r"\| 5000 \| 1 x 64 \| [1-9]\d* \| 0 \| - \| - \| - \| \d+ \|", patient)
    assert re.fullmatch(r"\| 0\.001 \| 1 x 64 \| 0 \| [1-9]\d*( \| \d+\.\d){3} \| \d+ \|", hasty)


def test_a_late_request_says_where_its_time_was() -> None:
    good, late = Outcome("output", 0.1, 0.01, 0.08), Outcome("output", 0.3, 0.002, 0.25)
    row = summary(2.0, 10.0, 1.0, 0.2, [good, late, Outcome("refused", 0.1, 0.0, 0.0)])
    assert (row["sent"], row["refused"], row["late"]) == (3, 1, 1)
    assert row["late_requests"] == [{"kind": "output", "seconds_ms": 300, "sent_ms": 2, "server_ms": 250}]
