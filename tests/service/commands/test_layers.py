"""`expertd layers`: the layers of a checkpoint, and what was understood of it."""

import json
import re
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from expertd.backends import taking
from expertd.service.cli import main
from expertd.weight_format import WeightFormat
from tests.paths import ROOT
from tests.service.checkpoints.builders import Checkpoint, edit_json
from tests.service.checkpoints.layouts import write

Output = pytest.CaptureFixture[str]


def test_layers_lists_the_layers_of_a_checkpoint(checkpoint: Path, capsys: Output) -> None:
    assert main(["layers", "--json", str(checkpoint)]) == 0
    about = json.loads(capsys.readouterr().out)
    assert (about["family"], about["hidden_size"], about["intermediate_size"]) == ("deepseek_v3", 256, 128)
    assert (about["num_experts"], about["num_shared_experts"], about["top_k"]) == (8, 1, 3)
    num_bytes, shared_bytes = (8 + 1) * 3 * 256 * 128, 3 * 256 * 128
    sizes = {"num_bytes": num_bytes, "shared_bytes": shared_bytes}
    assert about["layers"] == [
        {"layer": layer, "format": "FP8, a scale per 128x128", "served": "FP8", **sizes} for layer in (1, 2)
    ], "3 is for multi-token prediction, and the checkpoint leaves it out"
    assert main(["layers", str(checkpoint)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{checkpoint}: deepseek_v3, 2 MoE layers",
        "hidden_size 256, intermediate_size 128, num_experts 8, num_shared_experts 1, top_k 3",
        "routing: scoring_func sigmoid, renormalize True, routed_scaling_factor 2.5, num_expert_groups 4, "
        "topk_group 2, with a bias",
        "experts: down(silu(gate) * up)",
        "layers  weights                   served as  bytes a layer  of shared experts",
        f"1-2     FP8, a scale per 128x128  FP8              {num_bytes:,}             {shared_bytes:,}",
    ]


@pytest.mark.parametrize(
    ("family", "lines"),
    [
        ("qwen2", ["experts: down(silu(gate) * up), the shared one with a gate"]),
        (
            "hunyuan-4",
            ["experts: down(silu(min(gate, 0.7)) * clamp(up, 0.7)), shared ones down(silu(gate) * up)"],
        ),
        (
            "minimax-m3",
            ["experts: down(min(gate, 0.7) * sigmoid(1.702 * min(gate, 0.7)) * (clamp(up, 0.7) + 1))"],
        ),
        (
            "step-3.7",
            [
                "experts: down(min(silu(gate), 0.7) * clamp(up, 0.7)), shared ones down(silu(gate) * up)",
                "experts: down(silu(gate) * up), shared ones down(min(silu(gate), 0.4) * clamp(up, 0.4))",
            ],
        ),
        ("llama-4", ["experts: down(silu(gate) * up), weights on their input"]),
        (
            "deepseek-v4",
            [
                "experts: down(silu(min(gate, 0.7)) * clamp(up, 0.7))",
                "not served: 0: experts are chosen by the token's id, which requests do not carry",
            ],
        ),
    ],
)
def test_layers_says_what_was_understood(
    family: str, lines: list[str], tmp_path: Path, capsys: Output
) -> None:
    directory = Checkpoint(family, tmp_path / "model").directory
    capsys.readouterr()
    assert main(["layers", str(directory)]) == 0
    got = capsys.readouterr().out.splitlines()
    assert [line for line in got if line.startswith(("experts", "not"))] == lines
    assert main(["layers", "--json", str(directory)]) == 0
    about = json.loads(capsys.readouterr().out)
    assert {f"experts: {text}" for text in about["experts"].values()} == {
        line.removesuffix(", the shared one with a gate") for line in lines if line.startswith("experts")
    }
    assert about["shared_gate"] == (family == "qwen2")
    assert list(about["not_served"]) == (["0"] if family == "deepseek-v4" else [])


@pytest.mark.slow
def test_layers_that_are_not_quantized(tmp_path: Path, capsys: Output) -> None:
    directory = Checkpoint("qwen3-dense", tmp_path / "model").directory
    capsys.readouterr()
    assert main(["layers", "--json", str(directory)]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [(entry["layer"], entry["format"]) for entry in layers] == [(1, "bf16"), (2, "bf16")]


def test_layers_of_an_unsupported_checkpoint(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert main(["layers", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        f"expertd layers: {tmp_path}/config.json: model_type: expected a model with "
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_group": 3}, "num_experts: expected a multiple of num_expert_groups (3), got 8"),
        (
            {"routed_scaling_factor": 0},
            "routing.routed_scaling_factor: expected a number greater than 0, got 0.0",
        ),
        ({"first_k_dense_replace": 9}, "config.json: expected MoE layers, got none"),
        ({"model_type": "bert"}, "model_type: expected one of "),
    ],
)
def test_layers_check_and_serve_refuse_the_same(
    changes: dict[str, object], sentence: str, checkpoint: Path, tmp_path: Path, capsys: Output
) -> None:
    path = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    edit_json(path / "config.json", **changes)
    assert sentence in refused_by_all(path, capsys)


def refused_by_all(path: Path, capsys: Output) -> str:
    """The sentence with which `layers`, `check` and `serve` refuse a checkpoint."""
    served = ["--model", str(path), "--layers", "all", "--port", "0"]
    assert main(["layers", str(path)]) == 2
    sentence = capsys.readouterr().err.removeprefix("expertd layers: ")
    assert main(["serve", *served]) == 2
    assert sentence in capsys.readouterr().err
    assert main(["check", *served]) == 2
    assert sentence in capsys.readouterr().out
    return sentence


def test_layers_that_must_be_rounded_are_listed_if_allowed(tmp_path: Path, capsys: Output) -> None:
    write(tmp_path, "fp8 by row")
    sentence = "got FP8, a scale per row; with requantize: allow, it is rounded to that FP8\n"
    assert sentence in refused_by_all(tmp_path, capsys)
    assert main(["layers", "--requantize", "allow", str(tmp_path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["0", "FP8,", "a", "scale", "per", "row", "FP8", "393,216"]


def test_four_bits_are_served_by_a_backend_that_takes_them(tmp_path: Path, capsys: Output) -> None:
    write(tmp_path, "nvfp4")
    assert main(["layers", str(tmp_path)]) == 0
    *_, row, hint = capsys.readouterr().out.splitlines()
    assert row.split() == ["0", "NVFP4", "NVFP4", "196,608"]
    takers = taking(WeightFormat.NVFP4)
    assert hint == f"NVFP4 needs backend {takers}; others serve it in FP8, with --requantize allow"
    served = ["--model", str(tmp_path), "--port", "0", "--backend"]
    assert main(["check", *served, "reference"]) == 0
    assert "experts 0-3 of 4 in NVFP4:" in capsys.readouterr().out
    for command in ("check", "serve"):
        assert main([command, *served, "cpu"]) == 2
        shown = "".join(capsys.readouterr())
        assert (
            f"with requantize: allow, it is rounded to that FP8; backend {takers} takes it as it is" in shown
        )


def test_four_bits_are_fp8_where_that_is_asked_for(tmp_path: Path, capsys: Output) -> None:
    write(tmp_path, "mxfp4", sizes=(1024, 512))
    assert main(["layers", "--requantize", "always", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == ["0", "MXFP4", "FP8", "3,145,728"]
    served = ["check", "--model", str(tmp_path), "--port", "0", "--backend", "hopper", "--requantize"]

    def weights(requantize: str) -> float:
        main([*served, requantize])
        (found,) = re.findall(r"experts 0-3 of 4(.*?): .* \(weights ([\d.]+) MB", capsys.readouterr().out)
        assert found[0] == ("" if requantize == "always" else " in MXFP4")
        return float(found[1])

    router = 4 * 1024 * 6 / 1e6
    assert weights("always") - router == pytest.approx(4 * 3 * 1024 * 512 / 1e6, abs=0.06)
    four_bits = 0.5 + 2 / 32  # scales are in the packed copy, and as they were
    assert weights("refuse") - router == pytest.approx(4 * 3 * 1024 * 512 * four_bits / 1e6, abs=0.06)
    assert weights("allow") == weights("refuse")
    assert main([*served, "sometimes"]) == 2
    expected = "checkpoints.0.requantize: expected 'allow', 'always' or 'refuse', got 'sometimes'"
    assert expected in capsys.readouterr().out


def test_a_budget_counts_what_a_gpu_packs(tmp_path: Path, capsys: Output) -> None:
    write(tmp_path, "mxfp4")
    served = ["check", "--json", "--model", str(tmp_path), "--port", "0"]

    def store(backend: str, requantize: str) -> str:
        capsys.readouterr()
        budget = f"weights_budget={350 if requantize == 'always' else 180}KB"  # for three of four experts
        main([*served, "--backend", backend, "--requantize", requantize, "--set", budget])
        checks = json.loads(capsys.readouterr().out)["checks"]
        (found,) = (each["detail"] for each in checks if each["name"] == "expert store")
        return str(found)

    for requantize, backend in product(("refuse", "allow", "always"), ("hopper", "triton")):
        assert " of 4 experts on the device; " in store(backend, requantize)


@pytest.mark.usefixtures("no_gpu")
def test_auto_takes_a_backend_of_the_weights_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """With requantize: allow, or always, the fastest one, which rounds."""
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr("expertd.kernels.backends.cpu.why_slower", lambda: None)
    write(tmp_path, "nvfp4")
    served = ["check", "--model", str(tmp_path), "--port", "0"]
    assert main(served) == 0
    shown = capsys.readouterr().out
    assert "reference on cpu (cpu: no weights of NVFP4)" in shown
    assert "experts 0-3 of 4 in NVFP4:" in shown
    for requantize in ("allow", "always"):
        assert main([*served, "--requantize", requantize]) == 0
        shown = capsys.readouterr().out
        assert "cpu on cpu" in shown
        assert "NVFP4" not in shown


def test_layers_says_which_experts_are_in_four_bits(tmp_path: Path, capsys: Output) -> None:
    write(tmp_path, "int4", "three stacks")  # whose shared expert has floats
    capsys.readouterr()
    assert main(["layers", "--json", str(tmp_path)]) == 0
    (layer,) = json.loads(capsys.readouterr().out)["layers"]
    assert (layer["format"], layer["served"]) == ("fp32 and int4", "INT4 and FP8")


def test_the_documented_list_matches_the_output_of_layers(checkpoint: Path, capsys: Output) -> None:
    document = (ROOT / "docs" / "checkpoints.md").read_text()
    (documented,) = re.findall(r"^```\n(/tmp/.*?)^```$", document, re.M | re.S)
    assert main(["layers", str(checkpoint)]) == 0
    assert capsys.readouterr().out.replace(str(checkpoint), "/tmp/small-deepseek-v3") == documented
