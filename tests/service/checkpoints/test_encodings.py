"""Weights in every encoding: found by headers, refused unless they may be rounded, and decoded exactly."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from expertd.kernels import dequantize_blocks, quantize_blocks, resolve_backend
from expertd.service.checkpoints import CheckpointError, models_of
from expertd.service.checkpoints.expand import list_layers
from expertd.service.engine.layers import layer_of
from expertd.service.moe.weights import ExpertWeights
from expertd.service.settings.served import CheckpointSettings
from tests.kernels.helpers import fresh_generator
from tests.paths import ROOT
from tests.service.checkpoints.builders import edit_tensors
from tests.service.checkpoints.encoders import ENCODERS
from tests.service.checkpoints.losses import VENDORS, layer_losses, losses, vendor_losses

HIDDEN, INTERMEDIATE, EXPERTS = 256, 128, 4
SIZES = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}
BLOCK = "model.layers.0.mlp"
LOSSY = [name for name in ENCODERS if name not in ("fp8 by block", "fp8 by tensor")]


def write(directory: Path, encoding: str, shared: int = 2) -> dict[str, Tensor]:
    """Layer 0 of a model like GLM-4.5 with a shared expert of two parts; the numbers of each weight."""
    generator, (encode, _, quantization) = fresh_generator(), ENCODERS[encoding]
    tensors = {
        f"{BLOCK}.gate.weight": torch.randn(EXPERTS, HIDDEN, generator=generator) / 16,
        f"{BLOCK}.gate.e_score_correction_bias": torch.zeros(EXPERTS),
    }
    meant: dict[str, Tensor] = {}
    for expert in [*(f"experts.{number}" for number in range(EXPERTS)), "shared_experts"]:
        for part, (n, k) in SIZES.items():
            wide = shared if expert == "shared_experts" else 1
            size = (n, k * wide) if part == "down_proj" else (n * wide, k)
            name = f"{expert}.{part}"
            encoded, meant[name] = encode(torch.randn(size, generator=generator) * k**-0.5)
            tensors |= {f"{BLOCK}.{name}{suffix}": tensor for suffix, tensor in encoded.items()}
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "glm4_moe", "num_hidden_layers": 1, "hidden_size": HIDDEN, "num_experts_per_tok": 2,
        "first_k_dense_replace": 0, "moe_intermediate_size": INTERMEDIATE, "n_routed_experts": EXPERTS,
        "n_shared_experts": shared, "quantization_config": quantization,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return meant


def load(directory: Path, requantize: str = "allow") -> ExpertWeights:
    settings = CheckpointSettings.model_validate({"path": directory, "layers": "0", "requantize": requantize})
    (model,) = models_of(settings)
    return layer_of(model, resolve_backend("reference"), torch.device("cpu"), lambda: False).weights


def groups(meant: dict[str, Tensor], part: str) -> list[Tensor]:
    """The matrices of the routed experts, then of the shared one's parts."""
    shared = meant[f"shared_experts.{part}"].chunk(2, dim=1 if part == "down_proj" else 0)
    return [*(meant[f"experts.{expert}.{part}"] for expert in range(EXPERTS)), *shared]


@pytest.mark.parametrize("encoding", ENCODERS)
def test_an_encoding_is_decoded_exactly(encoding: str, tmp_path: Path) -> None:
    meant = write(tmp_path / "model", encoding)
    weights = load(tmp_path / "model", "refuse" if encoding not in LOSSY else "allow")
    gate, up, down = (groups(meant, part) for part in SIZES)
    for index in range(EXPERTS + 2):
        for got, matrix in (
            (weights.gate_up, torch.cat([gate[index], up[index]])),
            (weights.down, down[index]),
        ):
            data, scales = quantize_blocks(matrix.contiguous())
            if encoding in LOSSY and not encoding.startswith("mx"):
                assert torch.equal(got.data[index].view(torch.uint8), data.view(torch.uint8))
                assert torch.equal(got.scales[index], scales)
                continue
            decoded = dequantize_blocks(got.data[index], got.scales[index])
            if encoding == "mxfp8":  # the smallest numbers of a block underflow
                assert (decoded - matrix).norm() < 1e-4 * matrix.norm()
            else:
                assert torch.equal(decoded, matrix)


def test_the_documented_losses_are_measured() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text()
    documented = dict(re.findall(r"^\| ([^|]+) \| [\d.]+ \| ([\d.]+) \|$", text, re.M))
    command = "python -m tests.service.checkpoints.losses"
    for name, (_, added) in losses().items():
        assert float(documented[name]) == pytest.approx(added, abs=0.1), command


@pytest.mark.thorough
def test_the_documented_losses_of_a_layer_are_measured() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    documented = {name: list(map(float, errors)) for name, *errors in rows}
    for name, errors in layer_losses().items():
        assert documented[name] == pytest.approx(errors, abs=0.1)


@pytest.mark.thorough
def test_the_documented_differences_from_vendors_are_measured() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text()
    rows = re.findall(r"^\| (.+) \| (\w+) \| (.+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    documented = {name: (form, said, list(map(float, errors))) for name, form, said, *errors in rows}
    for name, errors in vendor_losses().items():
        form, said, figures = documented[name]
        assert (form, said) == VENDORS[name][:2]
        assert figures == pytest.approx(errors, abs=0.1)


@pytest.mark.parametrize("encoding", ENCODERS)
def test_encodings_are_listed(encoding: str, tmp_path: Path) -> None:
    write(tmp_path / "model", encoding)
    _, (listed,) = list_layers(tmp_path / "model", "allow")
    assert listed.format == ENCODERS[encoding][1]
    values = 3 * HIDDEN * INTERMEDIATE * (EXPERTS + 2)
    assert listed.num_bytes == values // (2 if "4" in listed.format else 1)


@pytest.mark.parametrize(
    ("encoding", "suffix", "tensor", "message"),
    [
        ("int4", "weight_zero_point", torch.zeros(1), "got .*weight_zero_point$"),
        ("int4", "weight_packed", torch.zeros(128, 8, dtype=torch.int32), r"shape: expected \(128, 32\)"),
        ("int4", "weight_scale", torch.ones(128, 3), r"128 rows and a divisor of 256 columns, got "),
        ("nvfp4", "weight_scale_2", None, r"expected tensor .*weight_scale_2, got none"),
        ("nvfp4", "weight_scale", torch.ones(128, 8).to(torch.float8_e4m3fn), r"expected \(128, 16\)"),
        ("nvfp4", "pre_quant_scale", torch.ones(256), r"got .*pre_quant_scale$"),
        ("mxfp4", "scale", torch.ones(128, 8), r"dtype: expected F8_E4M3 or F8_E8M0 or U8, got F32"),
        ("fp8 by row", "weight_scale", torch.ones(64, 1), r"shape: expected \(1, 2\) or .*, got \(64, 1\)"),
        ("fp8 by row", "weight", torch.ones(128, 256).to(torch.float8_e5m2), r"got F8_E5M2"),
        ("fp8 by tensor", "weight_scale", torch.ones((), dtype=torch.int32), r"dtype: expected BF16 or"),
    ],
)  # fmt: skip
def test_other_tensors_are_refused(
    encoding: str, suffix: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    write(tmp_path / "model", encoding)
    name = f"{BLOCK}.experts.1.up_proj.{suffix}"
    edit_tensors(tmp_path / "model" / "model.safetensors", **{name: tensor})
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e38])
def test_scales_that_are_not_finite_are_refused(bad: float, tmp_path: Path) -> None:
    write(tmp_path / "model", "fp8 by row")
    file, name = tmp_path / "model" / "model.safetensors", f"{BLOCK}.experts.1.up_proj.weight_scale"
    values = load_file(file)[name]
    values[0] = bad
    edit_tensors(file, **{name: values})
    with pytest.raises(CheckpointError, match=r"experts\.1\.up_proj\.weight: expected (finite|scales up to)"):
        load(tmp_path / "model")
