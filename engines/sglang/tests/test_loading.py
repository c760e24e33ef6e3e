"""The loader reads no experts, and the checkpoint's are those of the server."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from expertd_client import ModelMetadata, weights_id
from expertd_client.engine import PluginSettings, RemoteLayer
from expertd_sglang.experts import ExpertdFusedMoEMethod
from tests import stubs

EXPERT, NORM = "model.layers.3.mlp.experts.0.up_proj.weight", "model.norm.weight"


def load(directory: Path, model: torch.nn.Module, file: str = "model.safetensors") -> dict[str, Any]:
    config = SimpleNamespace(model_path=str(directory), revision=None)
    return dict(stubs.DefaultModelLoader([str(directory / file)])._get_all_weights(config, model))


def model_with(remote: Any) -> torch.nn.Module:
    model, layer = torch.nn.Module(), torch.nn.Module()
    layer.quant_method = ExpertdFusedMoEMethod(remote)
    model.add_module("experts", layer)
    return model


def remote_with(identity: str) -> RemoteLayer:
    server: Any = SimpleNamespace(settings=PluginSettings("http://a"))
    return RemoteLayer(server, "layer", 3, ModelMetadata("layer", 8, 2, "BF16", weights_id=identity))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tensors = {EXPERT: torch.randn(4, 8), NORM: torch.randn(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.usefixtures("plugin")
def test_experts_are_not_read(directory: Path) -> None:
    assert list(load(directory, model_with(remote_with(weights_id(directory, 3))))) == [NORM]


@pytest.mark.usefixtures("plugin")
def test_both_iterators_of_files_leave_experts_out(directory: Path) -> None:
    module = __import__("sglang.srt.model_loader.weight_utils", fromlist=["*"])
    files = [str(directory / "model.safetensors")]
    assert [name for name, _ in module.safetensors_weights_iterator(files, disable_mmap=True)] == [NORM]
    several = module.buffered_multi_thread_safetensors_weights_iterator(files, max_workers=8, prefetch=False)
    assert [name for name, _ in several] == [NORM]


@pytest.mark.usefixtures("plugin")
def test_another_checkpoint_is_refused_by_the_first_rank(directory: Path) -> None:
    model = model_with(remote_with("0" * 64))
    with pytest.raises(
        ValueError, match=f"layer on http://a: weights_id: expected .*{directory}.*, got 0000"
    ):
        load(directory, model)
    stubs.state.parallel.tp_rank = 1
    assert list(load(directory, model)) == [NORM]


@pytest.mark.usefixtures("plugin")
def test_other_files_are_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match=r"files: expected safetensors, got .*model\.bin"):
        load(directory, model_with(remote_with("")), "model.bin")


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize("name", ["mlp.experts", "block_sparse_moe.experts"])
def test_experts_of_other_classes_are_refused(directory: Path, name: str) -> None:
    model = torch.nn.Module()
    owner = model
    for part in ["model", "layers", "0", *name.split(".")]:
        owner.add_module(part, torch.nn.Module())
        owner = owner.get_submodule(part)
    owner.register_parameter("w13_weight", torch.nn.Parameter(torch.empty(8, 2, 2)))
    with pytest.raises(ValueError, match=f"experts: expected those of SGLang's FusedMoE, got .*0.{name}"):
        load(directory, model)
