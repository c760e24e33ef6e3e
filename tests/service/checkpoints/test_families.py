"""The MoE layers of each family, and its routing rule if config.json leaves it out."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from expertd.kernels import Routing
from expertd.service.checkpoints import read_model
from tests.families import FAMILIES, quiet_transformers
from tests.service.checkpoints.builders import edit_json


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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rule_is_read_from_the_config(family: str, tmp_path: Path) -> None:
    case = FAMILIES[family]
    with quiet_transformers():
        case.config().save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", model_type=case.model_type)
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


def test_deepseek_with_every_second_layer_and_prediction_layers(tmp_path: Path) -> None:
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 8, "num_nextn_predict_layers": 3,
        "moe_layer_freq": 2, "hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_model(tmp_path).layers == (4, 6, 8, 10)
