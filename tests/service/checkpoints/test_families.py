"""The MoE layers of each family, and its routing rule if config.json leaves it out."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from expertd.kernels import Routing
from expertd.service.checkpoints import CheckpointError, read_model
from expertd.service.checkpoints.families import FAMILIES as SERVED
from tests.families import FAMILIES, quiet_transformers
from tests.more_families import ALL_FAMILIES, EACH_FAMILY
from tests.service.checkpoints.builders import edit_json, nest_config

_CONFIG = {
    "num_hidden_layers": 4, "hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 128,
    "num_experts": 8, "num_experts_per_tok": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("deepseek-v3", {"first_k_dense_replace": 3}),
        ("glm-4.5", {"first_k_dense_replace": 2}),
        ("minimax-m2", {}),
        ("mixtral", {}),
        ("qwen3", {"decoder_sparse_step": 3}),
        ("qwen3", {"decoder_sparse_step": 2, "mlp_only_layers": [1, 4]}),
        ("qwen3", {"mlp_only_layers": [0, 6]}),
    ],
)
def test_moe_layers_are_those_of_transformers(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    case = FAMILIES[family]
    with quiet_transformers(), torch.device("meta"):
        config = case.config(num_hidden_layers=7, **settings)
        model = getattr(import_module("transformers"), f"{case.prefix}Model")(config)
        config.save_pretrained(tmp_path)
    theirs = [index for index, layer in enumerate(model.layers) if hasattr(layer.mlp, "experts")]
    ours = [layer for layer in read_model(tmp_path).layers if layer < 7]
    assert ours == theirs
    assert 0 < len(ours) <= 7


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_the_rule_is_read_from_the_config(family: str, tmp_path: Path) -> None:
    case = ALL_FAMILIES[family]
    with quiet_transformers():
        case.config().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", model_type=case.model_type)
    nest_config(tmp_path / "config.json")
    assert Routing(**read_model(tmp_path).routing) == case.routing


@pytest.mark.parametrize(
    ("model_type", "routing", "shared"),
    [
        ("deepseek_v3", ("sigmoid", True, 2.5, 8, 4), 1),
        ("glm4_moe", ("sigmoid", True, 1.0, 1, 1), 1),
        ("minimax_m2", ("sigmoid", True), 0),
        ("mixtral", ("softmax", True), 0),
        ("qwen3_moe", ("softmax", False), 0),
    ],
)
def test_defaults_of_missing_config_keys(
    model_type: str, routing: tuple[object, ...], shared: int, tmp_path: Path
) -> None:
    config = {
        "model_type": model_type, "num_hidden_layers": 5, "hidden_size": 256, "moe_intermediate_size": 128,
        "intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path)
    assert tuple(model.routing.values()) == routing
    assert model.num_shared_experts == shared


@pytest.mark.parametrize("family", ["kimi-k2.5", "glm-4.5v", "qwen3-vl", "qwen3-omni"])
def test_the_language_models_values_may_be_inside_or_alone(family: str, tmp_path: Path) -> None:
    case = ALL_FAMILIES[family]
    with quiet_transformers():
        case.config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    edit_json(path, model_type=f"{case.model_type}_text")
    alone = read_model(tmp_path)
    edit_json(path, model_type=case.model_type)
    assert replace(read_model(tmp_path), family=alone.family) == alone
    nest_config(path)
    assert replace(read_model(tmp_path), family=alone.family) == alone
    edit_json(path, **{SERVED[case.model_type].inside[0]: 7})
    with pytest.raises(CheckpointError, match="config: expected an object, got 7"):
        read_model(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "changes", "layers"),
    [
        ("glm_moe_dsa", {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, (1, 3)),
        ("glm_moe_dsa", {"moe_layer_freq": [0, 1, 0, 1], "num_nextn_predict_layers": 1}, (1, 3, 4)),
        ("mimo_v2_flash", {"moe_layer_freq": [0, 1, 1, 0], "routed_scaling_factor": None}, (1, 2)),
        ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_end_index": 2}, (1,)),
        ("jamba", {"expert_layer_period": 3, "expert_layer_offset": 1}, (1,)),
        ("afmoe", {"num_dense_layers": 3}, (3,)),
        (
            "deepseek_v3",
            {"num_hidden_layers": 8, "num_nextn_predict_layers": 3, "moe_layer_freq": 2},
            (4, 6, 8, 10),
        ),
    ],
)
def test_layers_by_other_rules(
    model_type: str, changes: dict[str, Any], layers: tuple[int, ...], tmp_path: Path
) -> None:
    config = _CONFIG | {"model_type": model_type} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path).layers == layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types: expected a list with 'dense' or 'sparse'"),
        ({"mlp_layer_types": ["moe"] * 4}, "mlp_layer_types: expected a list with"),
        ({"moe_layer_freq": [0, 1, 2, 1]}, "moe_layer_freq: expected a list with 0 or 1 for each of 4"),
        ({"n_shared_experts": None}, "n_shared_experts: expected a value, got null"),
        ({"scoring_func": "softmax"}, "scoring_func: expected 'sigmoid', got 'softmax'"),
        ({"route_norm": False}, "route_norm: expected True, got false"),
        ({"n_group": 4}, "n_group: expected 1 or 0, got 4"),
        ({"model_type": "minimax_m2", "routed_scaling_factor": 2.5}, "factor: expected 1, got 2.5"),
        ({"model_type": "minimax_m2", "n_shared_experts": 1}, "n_shared_experts: expected none, got 1"),
        ({"model_type": "hy_v4", "swiglu_limit": 0}, "swiglu_limit: expected a number above 0, got 0"),
        ({"model_type": "step3p7", "swiglu_limits": [1]}, "swiglu_limits: expected an entry for layer 3"),
        ({"model_type": "step3p7", "swiglu_limits": [-1] * 4}, "swiglu_limits: expected a list of numbers"),
        (
            {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 200},
            r"shared_expert_intermediate_size: expected a multiple of moe_intermediate_size \(128\), got 200",
        ),
        (
            {"model_type": "glm4_moe", "routed_scaling_factor": None},
            "routed_scaling_factor: expected a value, got null",
        ),
        ({"model_type": "mixtral", "hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
    ],
)
def test_wrong_lists_and_rules_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(_CONFIG | {"model_type": "hy_v3", "share_expert_dim": 128} | changes)
    )
    with pytest.raises(CheckpointError, match=message):
        read_model(tmp_path)


def test_a_list_of_equal_values_is_one_value(tmp_path: Path) -> None:
    """Hunyuan-A13B's config.json has an entry for each layer."""
    config = _CONFIG | {"model_type": "hunyuan_v1_moe", "moe_topk": [3] * 4, "num_shared_expert": [1] * 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path).top_k == 3
    edit_json(tmp_path / "config.json", num_shared_expert=[1, 1, 2, 1])
    with pytest.raises(CheckpointError, match=r"num_shared_expert: expected 1, got \[1, 1, 2, 1\]"):
        read_model(tmp_path)
    edit_json(tmp_path / "config.json", num_shared_expert=1, moe_topk=[3, 3, 3, 4])
    with pytest.raises(CheckpointError, match="num_experts_per_tok and moe_topk: expected the same value"):
        read_model(tmp_path)
