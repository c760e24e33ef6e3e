"""Tensors of a block that nothing uses are refused, by headers alone; names that layers may have."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from expertd.kernels import resolve_backend
from expertd.service.checkpoints import CheckpointError, models_of, read_model
from expertd.service.checkpoints.model import PREFIXES
from expertd.service.engine.layers import layer_of
from expertd.service.settings.served import CheckpointSettings
from tests.kernels.helpers import diff, fresh_generator
from tests.service.checkpoints.builders import Checkpoint, edit_json, edit_tensors, shard_of

BLOCK = "model.layers.1.mlp"
INDEX = "model.safetensors.index.json"
ONE = torch.ones(1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint("deepseek-v3", tmp_path_factory.mktemp("made") / "model", torch.float32)


@pytest.fixture
def directory(made: Checkpoint, tmp_path: Path) -> Path:
    """A copy to be changed."""
    return Path(shutil.copytree(made.directory, tmp_path / "model"))


def find(directory: Path, layers: str = "1-2", experts: str | None = None) -> int:
    return len(models_of(CheckpointSettings(path=directory, layers=layers, experts=experts)))


def in_index(directory: Path, name: str, file: str) -> None:
    weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
    edit_json(directory / INDEX, weight_map=weight_map | {name: file})


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize(
    "name",
    [
        "experts.8.up_proj.weight",
        "experts.08.up_proj.weight",
        "experts.3.up_proj.bias",
        "experts.3.up_proj.pre_quant_scale",
        "gate.bias",
        "shared_expert_gate.weight",
        "shared_experts.up_proj.bias",
        "experts.gate_up_proj_bias",
    ],
)
def test_unknown_tensors_are_refused(directory: Path, name: str, listed: bool) -> None:
    """Also those that a file has and the index does not."""
    file = shard_of(directory, f"{BLOCK}.experts.3.up_proj.weight")
    edit_tensors(file, **{f"{BLOCK}.{name}": ONE})
    if listed:
        in_index(directory, f"{BLOCK}.{name}", file.name)
    known = "a router and 8 experts and a shared one as in deepseek_v3"
    expected = f"{BLOCK}: expected only {known}, got {BLOCK}.{name}"
    with pytest.raises(CheckpointError) as refused:
        find(directory)
    assert str(refused.value) == f"{directory}: {expected}"
    assert find(directory, "2") == 1


@pytest.mark.parametrize("part", ["shared_mlp", "residual_mlp", "share_expert", "router", "moe", "ffn"])
def test_unknown_parts_beside_the_block_are_refused(directory: Path, part: str) -> None:
    file = shard_of(directory, f"{BLOCK}.gate.weight")
    edit_tensors(file, **{f"model.layers.1.{part}.up_proj.weight": ONE})
    with pytest.raises(CheckpointError, match=rf"got model\.layers\.1\.{part}\.up_proj\.weight$"):
        find(directory)


@pytest.mark.parametrize("part", ["self_attn", "post_mlp_layernorm", "ffn_norm", "hc_ffn_fn", "mamba"])
def test_other_parts_of_a_layer_are_its_own_business(directory: Path, part: str) -> None:
    file = shard_of(directory, f"{BLOCK}.gate.weight")
    edit_tensors(file, **{f"model.layers.1.{part}.weight": ONE, "model.layers.11.mlp.weight": ONE + 1})
    assert find(directory) == 2


@pytest.mark.parametrize("experts", ["0-3", "4-7", "2"])
def test_other_servers_experts_are_known(directory: Path, experts: str) -> None:
    assert find(directory, "1-2", experts) == 2


def test_scales_of_weights_that_are_not_fp8_are_refused(directory: Path) -> None:
    """Multiplied or not, one of the two would be wrong."""
    name = f"{BLOCK}.experts.3.up_proj.weight"
    edit_tensors(shard_of(directory, name), **{name: torch.zeros(128, 256, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=rf"got {name}_scale_inv$"):
        find(directory)


def test_an_edited_model_type_is_refused(tmp_path: Path) -> None:
    """Qwen2-MoE's checkpoints as Qwen3-MoE's would lose their shared expert."""
    directory = Checkpoint("qwen3", tmp_path / "model").directory
    file = shard_of(directory, f"{BLOCK}.gate.weight")
    edit_tensors(file, **{f"{BLOCK}.shared_expert.up_proj.weight": ONE})
    with pytest.raises(CheckpointError, match=r"a router and 8 experts as in qwen3_moe, got .*shared_expert"):
        find(directory, "1")


def renamed(made: Checkpoint, directory: Path, prefix: str) -> None:
    """A checkpoint of one file, with another prefix of its layers."""
    directory.mkdir()
    shutil.copy(made.directory / "config.json", directory)
    tensors: dict[str, Tensor] = {}
    for file in made.directory.glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(
        {name.replace("model.layers.", prefix): value for name, value in tensors.items()},
        directory / "model.safetensors",
    )


@pytest.mark.parametrize("prefix", PREFIXES)
def test_layers_may_have_a_prefix(prefix: str, made: Checkpoint, tmp_path: Path) -> None:
    renamed(made, tmp_path / "model", prefix)
    (model,) = models_of(CheckpointSettings(path=tmp_path / "model", layers="1"))
    layer = layer_of(model, resolve_backend("reference"), torch.device("cpu"), lambda: False)
    tokens = torch.randn(16, 256, generator=fresh_generator()).to(torch.bfloat16)
    expected, _, _ = made.run(1, tokens)
    assert diff(layer(tokens), expected) < 2e-4


def test_layers_that_need_token_ids_are_refused_by_name(tmp_path: Path) -> None:
    directory = Checkpoint("deepseek-v4", tmp_path / "model").directory
    why = "experts are chosen by the token's id, which requests do not carry"
    with pytest.raises(CheckpointError, match=rf"layers: expected 1-2, got all: in layer 0, {why}$"):
        find(directory, "all")
    with pytest.raises(CheckpointError, match=rf"expected MoE layers \(1-2\), got 0: there, {why}$"):
        find(directory, "0")
    assert find(directory, "1-2") == 2
    edit_json(directory / "config.json", mlp_layer_types=..., num_hash_layers=2)
    with pytest.raises(CheckpointError, match=r"layers: expected 2, got all: in layer 0"):
        find(directory, "all")


def test_two_prefixes_for_one_layer_are_refused(directory: Path) -> None:
    name = "model.language_model.layers.1.mlp.gate.weight"
    in_index(directory, name, "model-00001-of-00008.safetensors")
    with pytest.raises(
        CheckpointError, match=r"layer 1: expected one, got model\.layers\.1\. and model\.lang"
    ):
        find(directory)


def test_a_directory_of_the_hubs_cache_needs_its_snapshot(made: Checkpoint, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--deepseek-ai--DeepSeek-V3" / "snapshots" / "0a1b2c"
    shutil.copytree(made.directory, snapshot)
    with pytest.raises(
        CheckpointError, match=rf"expected a snapshot .*, got the model's .*; try {snapshot}$"
    ):
        read_model(snapshot.parent.parent)
