"""The service loads checkpoints of random weights, for every family."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.make_checkpoint import make_checkpoint
from expertd.kernels import resolve_backend
from expertd.service.checkpoints import CheckpointError, models_of
from expertd.service.engine.layers import layer_of
from expertd.service.settings.served import CheckpointSettings
from tests.families import FAMILIES, HIDDEN, quiet_transformers


def run(directory: Path, layer: int) -> torch.Tensor:
    """The layer's output for five random tokens."""
    (model,) = models_of(CheckpointSettings(path=directory, layers=str(layer)))
    made = layer_of(model, resolve_backend("reference"), torch.device("cpu"), lambda: False)
    return made(torch.randn(5, HIDDEN))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_made(family: str, tmp_path: Path) -> None:
    case = FAMILIES[family]
    with quiet_transformers():
        values = case.config().to_dict() | {"model_type": case.model_type}
    values["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}  # not of what is made
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    assert make_checkpoint(tmp_path / "made", tmp_path, "1-2") == [1, 2]
    for layer in (1, 2):
        out = run(tmp_path / "made", layer)
        assert out.isfinite().all()
        assert 0.05 < out.std() < 5


def test_the_default_checkpoint_needs_no_config(tmp_path: Path) -> None:
    assert make_checkpoint(tmp_path / "made") == [1, 2]
    assert run(tmp_path / "made", 2).isfinite().all()


def test_a_missing_layer_is_refused_and_leaves_no_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layers: expected MoE layers of the model, got 0"):
        make_checkpoint(tmp_path / "made", layers="0-1")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match="model_type"):
        make_checkpoint(tmp_path / "made", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
