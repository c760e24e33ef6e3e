"""The parts of benchmarks that need no GPU: shapes, pictures and command lines."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

import benchmarks.gemm.gemm_sweep
import benchmarks.gemm.grouped_gemm
import benchmarks.gemm.host_cost
import benchmarks.layer.expert_store
import benchmarks.layer.layer_peers
import benchmarks.layer.moe_layer
import benchmarks.layer.numerics
import benchmarks.ranks.parallel
import benchmarks.serving.serving
import benchmarks.serving.steps
import benchmarks.serving.stream_steps
from benchmarks.__main__ import PACKAGES, main
from benchmarks.layer.families import FAMILIES, make_family
from benchmarks.lib import cpus
from benchmarks.report import SECTIONS
from benchmarks.serving import deadlines
from expertd.service.moe.shape import LayerShape
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
        benchmarks.layer.expert_store, benchmarks.layer.moe_layer, benchmarks.ranks.parallel,
        benchmarks.serving.serving, benchmarks.serving.steps, benchmarks.serving.stream_steps,
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
