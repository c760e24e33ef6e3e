"""Layers that cannot be on a server are refused when vLLM makes them, each in a sentence."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe import MoERunner, RoutedExperts

from expertd_client import ModelMetadata
from expertd_client.engine import RemoteLayer
from expertd_vllm import experts
from expertd_vllm.experts import ExpertdMoEMethod, Remote, RemoteRunner, replaced
from tests.test_settings import config

METADATA: dict[str, Any] = {"hidden_size": 128, "num_experts": 8, "top_k": 2, "shared_experts": "none"}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A configuration of a model with the plugin."""
    made = config({"expertd": {"url": "http://a"}}, compilation_config__splitting_ops=["vllm::attention"])
    made.load_config = SimpleNamespace(load_format="expertd")
    monkeypatch.setattr(experts, "get_model_architecture", lambda _: None)
    monkeypatch.setattr(experts, "get_current_vllm_config", lambda: made)
    return made


def test_all_classes_of_experts_are_replaced_while_a_model_is_made(made: Any) -> None:
    from vllm.model_executor.models.dbrx import DbrxExperts
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts
    from vllm.model_executor.models.transformers.moe import TransformersRoutedExperts

    before = dict(op_registry_oot)
    for _ in range(2):
        with replaced(made, None):
            for kind in (RoutedExperts, DbrxExperts, GptOssRoutedExperts, TransformersRoutedExperts):
                assert issubclass(op_registry_oot[kind.__name__], kind)
                assert issubclass(op_registry_oot[kind.__name__], Remote)
                assert kind.__name__ in experts._KINDS
        assert op_registry_oot == before


def test_all_classes_that_run_layers_are_replaced(made: Any) -> None:
    from vllm.model_executor.models.transformers.moe import TransformersMoERunner

    with replaced(made, None):
        for kind in (MoERunner, TransformersMoERunner):
            assert issubclass(op_registry_oot[kind.__name__], kind)
            assert issubclass(op_registry_oot[kind.__name__], RemoteRunner)


def test_classes_of_another_plugin_stay(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(op_registry_oot, "MoERunner", object)
    with pytest.raises(ValueError, match=r"expected none of another plugin, got \['MoERunner'\]"):
        replaced(made, None).__enter__()
    assert op_registry_oot["MoERunner"] is object


def test_graphs_are_split_at_layers(made: Any) -> None:
    for _ in range(2):
        with replaced(made, None):
            assert made.compilation_config.splitting_ops == ["vllm::attention", experts._SPLITTING]
    made.compilation_config.splitting_ops = []  # nothing is split, as with --enforce-eager
    with replaced(made, None):
        assert made.compilation_config.splitting_ops == []


def test_the_system_is_asked_for_amx(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(True))
    with replaced(made, None):
        assert asked


@pytest.mark.parametrize(
    ("kind", "weighs_input", "prefix", "text"),
    [
        (
            "MuseSparkRoutedExperts",
            False,
            "model.layers.3.mlp.experts",
            "experts: expected RoutedExperts or ",
        ),
        (
            "RoutedExperts",
            True,
            "model.layers.3.mlp.experts",
            "3.mlp.experts: routing weights: expected on outputs",
        ),
        ("RoutedExperts", False, "mtp.layers.0.mlp.experts", "layer: expected .*, got mtp.layers.0"),
    ],
)
def test_experts(made: Any, kind: str, weighs_input: bool, prefix: str, text: str) -> None:
    attributes = {"kind": type(kind, (), {}), "apply_router_weight_on_input": weighs_input}
    layer = type("Layer", (Remote,), attributes)()
    with pytest.raises(ValueError, match=text):
        layer._get_quant_method(prefix, None, None)


def test_a_layer_of_another_model() -> None:
    server: Any = SimpleNamespace(settings=SimpleNamespace(url="http://a"))
    remote = RemoteLayer(server, "layer", 3, ModelMetadata(name="layer", datatype="BF16", **METADATA))
    moe = SimpleNamespace(hidden_dim=64, num_logical_experts=8, experts_per_token=2)
    with pytest.raises(ValueError, match="layer on http://a: hidden_size: expected 64, got 128"):
        ExpertdMoEMethod(moe, remote)
