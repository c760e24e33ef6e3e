"""Checkpoints that cannot be served are refused with one sentence, before anything is loaded."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from expertd.kernels import resolve_backend
from expertd.service.checkpoints import CheckpointError, models_of, read_model
from expertd.service.checkpoints.families import FAMILIES as SERVED
from expertd.service.checkpoints.model import PREFIXES
from expertd.service.engine.layers import layer_of
from expertd.service.settings.served import CheckpointSettings
from tests.kernels.helpers import diff, fresh_generator
from tests.more_families import ALL_FAMILIES
from tests.service.checkpoints.builders import Checkpoint, edit_json, edit_tensors, shard_of

EXPERT, BLOCK = "model.layers.1.mlp.experts.3", "model.layers.2.mlp"
KNOWN, ONE = "model.layers.1.mlp", torch.ones(1)
UP, SCALES = f"{EXPERT}.up_proj.weight", f"{EXPERT}.up_proj.weight_scale_inv"
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint("deepseek-v3", tmp_path_factory.mktemp("made") / "model", torch.float32)


@pytest.fixture
def directory(made: Checkpoint, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(made.directory, tmp_path / "model"))


def find(directory: Path, layers: str = "1-2", experts: str | None = None) -> list[str]:
    settings = CheckpointSettings(path=directory, layers=layers, experts=experts)
    return [model.name for model in models_of(settings)]


def config(**changes: object) -> Damage:
    return lambda directory: edit_json(directory / "config.json", **changes)


def tensor(name: str, value: torch.Tensor | None) -> Damage:
    return lambda directory: edit_tensors(shard_of(directory, name), **{name: value})


def in_index(name: str, file: object) -> Damage:
    def damage(directory: Path) -> None:
        weight_map = json.loads((directory / INDEX).read_text())["weight_map"] | {name: file}
        kept = {key: value for key, value in weight_map.items() if value is not ...}
        edit_json(directory / INDEX, weight_map=kept)

    return damage


def truncate(directory: Path) -> None:
    file = shard_of(directory, UP)
    file.write_bytes(file.read_bytes()[:-1])


def no_header(directory: Path) -> None:
    shard_of(directory, UP).write_bytes(b"\xff" * 64)


def pipe(directory: Path) -> None:
    file = shard_of(directory, UP)
    file.unlink()
    os.mkfifo(file)


def config_pipe(directory: Path) -> None:
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")


def only_pickles(directory: Path) -> None:
    for file in (*directory.glob("*.safetensors"), directory / INDEX):
        file.unlink()
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04N.")


def only_gguf(directory: Path) -> None:
    """With config.json, as some repositories have it."""
    for file in (*directory.glob("*.safetensors"), directory / INDEX):
        file.unlink()
    (directory / "model-Q4_K_M.gguf").write_bytes(b"GGUF")


def only_gguf_without_config(directory: Path) -> None:
    only_gguf(directory)
    (directory / "config.json").unlink()


def without(pattern: str) -> Damage:
    def damage(directory: Path) -> None:
        for file in directory.glob(pattern):
            file.unlink()

    return damage


DENSE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "llama", **DENSE},
        {"model_type": "qwen3", **DENSE},
        {"model_type": "mistral3", "text_config": {"model_type": "mistral", **DENSE}},
        {"model_type": "gemma4", "text_config": {**DENSE, "enable_moe_block": False, "num_experts": None}},
        {"model_type": "granitemoehybrid", **DENSE, "num_local_experts": 0, "num_experts_per_tok": 0},
    ],
    ids=lambda values: str(values["model_type"]),
)
def test_a_dense_model_has_no_experts(tmp_path: Path, values: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    expected = (
        f"model_type: expected a model with experts, got '{values['model_type']}', which has no experts"
    )
    with pytest.raises(CheckpointError, match=f"{expected}$"):
        find(tmp_path)


BAD_JSON = r"config\.json: expected JSON, got invalid JSON: "
BESIDE = r"expected a .safetensors file in the same directory, got "


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            config(first_k_dense_replace=9, num_nextn_predict_layers=0),
            r"expected MoE layers, got none: .* has no experts$",
        ),
        (without("config.json"), r"config\.json: cannot be read: No such file"),
        (lambda d: (d / "config.json").write_text("{"), BAD_JSON),
        (lambda d: (d / "config.json").write_text("[" * 100_000), BAD_JSON),
        (lambda d: (d / "config.json").write_text("[1]"), r"config\.json: expected a JSON object, got \[1\]"),
        (config(model_type="gpt2"), r"model_type: expected one of afmoe, .*deepseek_v3, .*, got 'gpt2'"),
        (config(model_type="gemma4"), r"model_type: expected another one, got gemma4: .* gelu"),
        (config(model_type=...), r"model_type: expected one of .*, got null"),
        (config(model_type=["mixtral"]), r"model_type: expected one of .*, got \['mixtral'\]"),
        (config(hidden_act="gelu"), r"hidden_act: expected 'silu', got 'gelu'"),
        (config(scoring_func="softmax"), r"scoring_func: expected 'sigmoid', got 'softmax'"),
        (config(topk_method="greedy"), r"topk_method: expected 'noaux_tc', got 'greedy'"),
        (config(hidden_size=...), r"hidden_size: expected a value, got none"),
        (config(hidden_size="256"), r"hidden_size: expected an integer from 0 to 1000000, got '256'"),
        (config(hidden_size=2.5), r"hidden_size: expected an integer from 0 to 1000000, got 2\.5"),
        (config(num_hidden_layers=10**12), r"num_hidden_layers: expected .* to 1000000, got 1000000000000"),
        (config(n_shared_experts=10**6), r"num_shared_experts: expected at most 1024 .*, got 1000008"),
        (config(n_group=0), r"n_group: expected an integer from 1 to 1000000, got 0"),
        (config(num_experts_per_tok=0), r"num_experts_per_tok: expected an integer from 1 to .*, got 0"),
        (config(norm_topk_prob=1), r"norm_topk_prob: expected true or false, got 1"),
        (config(routed_scaling_factor="2"), r"scaling_factor: expected a number up to 1000000, got '2'"),
        (config(routed_scaling_factor=None), r"routed_scaling_factor: expected a value, got null"),
        (config(n_group=None), r"n_group: expected a value, got null"),
        (config(num_experts=16), r"n_routed_experts and num_experts: expected the same value, got 8 and 16"),
        (config(routed_scaling_factor=10**400), r"scaling_factor: .*, got an integer of more than 80 digits"),
        (config(routed_scaling_factor=float("nan")), r"scaling_factor: expected a number .*, got nan"),
        (config(routed_scaling_factor=-1), r"json: routing\.routed_scaling_factor: .*than 0, got -1"),
        (config(moe_intermediate_size=192), r"json: moe_intermediate_size: .* multiple of 128, got 192"),
        (config(hidden_size=320), r"json: hidden_size: expected a multiple of 128, got 320"),
        (config(num_experts_per_tok=9), r"config\.json: top_k: expected 1 to num_experts .8., got 9"),
        (config(n_routed_experts=1025), r"n_routed_experts: expected .* from 1 to 1024, got 1025"),
        (config(moe_layer_freq=0), r"moe_layer_freq: expected an integer from 1 to"),
        (config(hidden_size=10**30), r"hidden_size: expected an integer .*, got 1000000"),
        (config(n_group=3), r"json: num_experts: expected a multiple of num_expert_groups \(3\), got 8"),
        (config(quantization_config="fp8"), r"quantization_config: expected an object, got 'fp8'"),
        (config(hidden_size=384), r"gate_proj\.weight shape: expected \(128, 384\), got \(128, 256\)"),
        (config(n_routed_experts=12), r"expected tensor model\.layers\.1\.mlp\.experts\.8\.gate_proj\."),
        (in_index(UP, ...), rf"{INDEX}: expected tensor {UP}, got none"),
        (tensor(UP, None), rf"\d\.safetensors: expected tensor {UP}, got none"),
        (
            tensor(f"{EXPERT}.down_proj.weight_scale_inv", None),
            rf"s: expected tensor {EXPERT}\.down_proj\.weight_scale_inv, got none",
        ),
        (
            tensor(SCALES, torch.ones(128, 1)),
            r"weight_scale_inv shape: expected \(1, 2\) or \(1, 1\), got \(128, 1\)",
        ),
        (
            tensor(SCALES, torch.ones(1, 2, dtype=torch.int32)),
            r"_scale_inv dtype: expected BF16 or .*, got I32",
        ),
        (
            tensor(UP, torch.zeros(128, 256, dtype=torch.uint8)),
            r"up_proj\.weight dtype: expected F8_E4M3 or BF16 .*, got U8",
        ),
        (
            tensor(f"{BLOCK}.gate.weight", torch.zeros(256, 8)),
            r"2\.mlp\.gate\.weight shape: expected \(8, 256\), got \(256, 8\)",
        ),
        (
            tensor(f"{BLOCK}.gate.e_score_correction_bias", None),
            rf"expected tensor {BLOCK}\.gate\.e_score_correction_bias",
        ),
        (
            tensor(f"{BLOCK}.shared_experts.up_proj.weight", None),
            rf"expected tensor {BLOCK}\.shared_experts\.up_proj\.weight",
        ),
        (truncate, r"\d\.safetensors: expected a safetensors file, got: .*"),
        (no_header, r"\d\.safetensors: expected a safetensors file, got: .*"),
        (without("model-00003-*"), r"model-00003-of-\d+\.safetensors: cannot be read: No such file"),
        (
            in_index(UP, "../model/model-00001-of-00008.safetensors"),
            r"up_proj\.weight: " + BESIDE + r"'\.\./model/model-00001",
        ),
        (in_index(UP, "/etc/passwd"), BESIDE + r"'/etc/pa"),
        (in_index(UP, ".."), BESIDE + r"'\.\.'"),
        (in_index(UP, "\ud800.safetensors"), BESIDE + r"'\\ud800\.safetensors'"),
        (in_index(UP, "a\nb.safetensors"), BESIDE + r"'a\\nb\.safetensors'"),
        (pipe, r"\d\.safetensors: expected a regular file, got something else"),
        (config_pipe, r"config\.json: expected a regular file, got something else"),
        (in_index(UP, 7), BESIDE + r"7"),
        (lambda d: edit_json(d / INDEX, weight_map=[]), r"weight_map: expected an object, got \[\]"),
        (lambda d: edit_json(d / INDEX, weight_map=None), r"weight_map: expected an object, got null"),
        (only_gguf, r"got GGUF \(model-Q4_K_M\.gguf\); serve the checkpoint that it was made from$"),
        (only_gguf_without_config, r"expected config\.json .*, got GGUF"),
        (only_pickles, r"expected .*, got pickles, which are never loaded \(pytorch_model\.bin\)"),
        (without("model*"), r"expected model\.safetensors\.index\.json or model\.safetensors, got neither"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused(directory: Path, damage: Damage, message: str) -> None:
    damage(directory)
    with pytest.raises(CheckpointError, match=message) as refused:
        find(directory)
    assert str(directory) in str(refused.value), "the sentence names the file"
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("layers", "experts", "message"),
    [
        ("0-1", None, r"layers: expected MoE layers \(1-3\), got 0"),
        ("1,9", None, r"layers: expected MoE layers \(1-3\), got 9"),
        (
            "3",
            None,
            r"expected tensor model\.layers\.3\..* got none",
        ),  # multi-token prediction: not saved
        ("1", "5-8", r"experts: expected a range of 0 to 7, got 5-8"),
    ],
)
def test_missing_layers_and_experts_are_refused(
    directory: Path, layers: str, experts: str | None, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        find(directory, layers, experts)


def test_links_may_point_outside_the_directory(directory: Path, tmp_path: Path) -> None:
    """The hub's cache consists of links."""
    assert find(directory) == ["model.layers.1", "model.layers.2"]
    elsewhere = tmp_path / "blobs"
    elsewhere.mkdir()
    for number, file in enumerate(directory.glob("*.safetensors")):
        file.rename(elsewhere / str(number))
        file.symlink_to(elsewhere / str(number))
    assert find(directory) == ["model.layers.1", "model.layers.2"]


def test_a_part_has_the_shared_expert_only_with_expert_0(directory: Path) -> None:
    def shared(experts: str) -> int:
        (model,) = models_of(CheckpointSettings(path=directory, layers="1", experts=experts))
        return model.num_shared_experts

    assert [shared(experts) for experts in ("0-7", "0-3", "4-7", "1")] == [1, 1, 0, 0]


def test_a_model_in_the_hubs_cache_is_named_after_the_model(made: Checkpoint, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--deepseek-ai--DeepSeek-V3" / "snapshots" / "0a1b2c"
    shutil.copytree(made.directory, snapshot)
    assert find(snapshot, "1") == ["DeepSeek-V3.layers.1"]
    (tmp_path / "current").symlink_to(snapshot)
    assert find(tmp_path / "current", "1") == ["current.layers.1"]


def test_a_directory_without_a_valid_model_name_needs_one(made: Checkpoint, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(made.directory, tmp_path / "my model"))
    with pytest.raises(CheckpointError, match=r"my model: name: expected --name .*, got 'my model'"):
        find(directory)
    settings = CheckpointSettings(path=directory, layers="1", name="mine")
    assert [model.name for model in models_of(settings)] == ["mine.layers.1"]


def test_inspecting_a_checkpoint_does_not_import_torch(directory: Path) -> None:
    code = (
        "import sys; from expertd.service.settings.loader import Flag, load_settings\n"
        "from expertd.service.checkpoints import resolve_checkpoints\n"
        f"flags = [Flag('', 'checkpoints', [{{'path': {str(directory)!r}, 'layers': '1-2'}}])]\n"
        "assert len(resolve_checkpoints(load_settings(None, flags)).models) == 2\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_family_has_a_case() -> None:
    assert {case.model_type for case in ALL_FAMILIES.values()} == set(SERVED)


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
    file = shard_of(directory, f"{KNOWN}.experts.3.up_proj.weight")
    edit_tensors(file, **{f"{KNOWN}.{name}": ONE})
    if listed:
        in_index(f"{KNOWN}.{name}", file.name)(directory)
    known = "a router and 8 experts and a shared one as in deepseek_v3"
    expected = f"{KNOWN}: expected only {known}, got {KNOWN}.{name}"
    with pytest.raises(CheckpointError) as refused:
        find(directory)
    assert str(refused.value) == f"{directory}: {expected}"
    assert len(find(directory, "2")) == 1


@pytest.mark.parametrize("part", ["shared_mlp", "residual_mlp", "share_expert", "router", "moe", "ffn"])
def test_unknown_parts_beside_the_block_are_refused(directory: Path, part: str) -> None:
    file = shard_of(directory, f"{KNOWN}.gate.weight")
    edit_tensors(file, **{f"model.layers.1.{part}.up_proj.weight": ONE})
    with pytest.raises(CheckpointError, match=rf"got model\.layers\.1\.{part}\.up_proj\.weight$"):
        find(directory)


@pytest.mark.parametrize("part", ["self_attn", "post_mlp_layernorm", "ffn_norm", "hc_ffn_fn", "mamba"])
def test_other_parts_of_a_layer_are_its_own_business(directory: Path, part: str) -> None:
    file = shard_of(directory, f"{KNOWN}.gate.weight")
    edit_tensors(file, **{f"model.layers.1.{part}.weight": ONE, "model.layers.11.mlp.weight": ONE + 1})
    assert len(find(directory)) == 2


@pytest.mark.parametrize("experts", ["0-3", "4-7", "2"])
def test_other_servers_experts_are_known(directory: Path, experts: str) -> None:
    assert len(find(directory, "1-2", experts)) == 2


def test_scales_of_weights_that_are_not_fp8_are_refused(directory: Path) -> None:
    """Multiplied or not, one of the two would be wrong."""
    name = f"{KNOWN}.experts.3.up_proj.weight"
    edit_tensors(shard_of(directory, name), **{name: torch.zeros(128, 256, dtype=torch.bfloat16)})
    with pytest.raises(CheckpointError, match=rf"got {name}_scale_inv$"):
        find(directory)


def test_an_edited_model_type_is_refused(tmp_path: Path) -> None:
    """Qwen2-MoE's checkpoints as Qwen3-MoE's would lose their shared expert."""
    directory = Checkpoint("qwen3", tmp_path / "model").directory
    file = shard_of(directory, f"{KNOWN}.gate.weight")
    edit_tensors(file, **{f"{KNOWN}.shared_expert.up_proj.weight": ONE})
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
    assert len(find(directory, "1-2")) == 2
    edit_json(directory / "config.json", mlp_layer_types=..., num_hash_layers=2)
    with pytest.raises(CheckpointError, match=r"layers: expected 2, got all: in layer 0"):
        find(directory, "all")


def test_two_prefixes_for_one_layer_are_refused(directory: Path) -> None:
    name = "model.language_model.layers.1.mlp.gate.weight"
    in_index(name, "model-00001-of-00008.safetensors")(directory)
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
