"""Layers are made without weights, or refused in a sentence; without settings nothing changes."""

from types import SimpleNamespace
from typing import Any

import pytest

from expertd_client import ModelMetadata
from expertd_client.engine import PluginSettings, RemoteLayer
from expertd_sglang import register
from expertd_sglang.experts import ExpertdFusedMoEMethod
from tests import stubs
from tests.conftest import URL, use

ARGUMENTS: dict[str, Any] = {
    "num_experts": 8, "hidden_size": 128, "intermediate_size": 64, "layer_id": 3, "top_k": 2,
    "prefix": "model.layers.3.mlp.experts",
}  # fmt: skip
METADATA: dict[str, Any] = {"hidden_size": 128, "num_experts": 8, "top_k": 2, "shared_experts": "excluded"}


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server says of its layers."""
    said, asked = dict(METADATA), []

    class Server:
        def __init__(self, settings: PluginSettings) -> None:
            self.settings = settings

        def layer(self, number: int) -> RemoteLayer:
            asked.append(number)
            about = ModelMetadata(name=f"small.layers.{number}", datatype="BF16", **said)
            server: Any = self
            return RemoteLayer(server, about.name, number, about)

    monkeypatch.setattr("expertd_sglang.hooks.server_of", Server)
    return said


def test_without_settings_nothing_changes() -> None:
    register()
    assert stubs.HookRegistry.hooks == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ("", "SGLANG_EXPERTD: expected settings with the URL of a server, as .*, got $"),
        ("http://a", "expected settings with the URL of a server, .* got http://a"),
        ("{}", "expected settings with the URL of a server"),
        ("[]", "expected settings with the URL of a server"),
        ('{"url": ""}', "expected settings with the URL of a server"),
        ('{"url": "http://a", "max_token": 3}', "settings: expected url or .*, got max_token"),
        ('{"url": "http://a", "transport": "tcp"}', "transport: expected .*, got tcp"),
    ],
)
def test_wrong_settings_end_the_process(settings: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by an exception, after which SGLang would load the experts itself."""
    with pytest.raises(SystemExit, match=text):
        use(monkeypatch, settings)


def test_another_sglang_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(stubs.DefaultModelLoader, "_get_all_weights")
    with pytest.raises(SystemExit, match=r"expertd-sglang: .* has no attribute '_get_all_weights'"):
        use(monkeypatch, '{"url": "http://a"}')


@pytest.mark.usefixtures("plugin", "metadata")
@pytest.mark.parametrize(
    "prefix", ["model.layers.3.mlp.experts", "layers.3.experts", "model.language_model.layers.3.moe.experts"]
)
def test_a_layer_has_no_weights(prefix: str) -> None:
    layer = stubs.FusedMoE(**(ARGUMENTS | {"prefix": prefix}))
    assert isinstance(layer.quant_method, ExpertdFusedMoEMethod)
    assert (layer.quant_method.remote.name, layer.quant_method.remote.number) == ("small.layers.3", 3)
    assert layer.quant_method.remote.server.settings == PluginSettings(URL, "small")
    assert list(layer.parameters()) == []
    assert layer.runner_backend is None  # so that the router says ids and weights


@pytest.mark.usefixtures("plugin", "metadata")
def test_shared_experts_stay() -> None:
    class SharedFusedMoE(stubs.FusedMoE):
        is_shared_fused_moe = True

    assert len(list(SharedFusedMoE(**ARGUMENTS).parameters())) == 1


class OtherMoE(stubs.FusedMoE):
    """Of a model with a kernel of its own."""


@pytest.mark.usefixtures("plugin", "metadata")
@pytest.mark.parametrize(
    ("kind", "changed", "text"),
    [
        (stubs.FusedMoE, {"prefix": ""}, "layer: expected a name with layers.3 and experts, got none"),
        (stubs.FusedMoE, {"layer_id": 4}, "layer: expected a name with layers.4 .*, got model.layers.3"),
        (stubs.FusedMoE, {"prefix": "model.layers.13.experts"}, "with layers.3 .*, got model.layers.13"),
        (stubs.FusedMoE, {"prefix": "layers.3.text_experts"}, "with layers.3 .*, got layers.3.text_experts"),
        (stubs.FusedMoE, {"prefix": "model.decoder.mlp.experts"}, "got model.decoder.mlp.experts"),
        (OtherMoE, {}, "layers.3.mlp.experts: experts: expected FusedMoE's own, got OtherMoE"),
        (stubs.FusedMoE, {"quant_method": stubs.FusedMoEMethodBase()}, "experts: expected FusedMoE's own"),
        (stubs.FusedMoE, {"apply_router_weight_on_input": True}, "expected on outputs of experts"),
        (stubs.FusedMoE, {"no_combine": True}, "outputs of experts: expected their sum"),
        (stubs.FusedMoE, {"num_fused_shared_experts": 1}, "expected 0 .--disable-shared-experts-f.*, got 1"),
        (stubs.FusedMoE, {"hidden_size": 64}, "layers.3 on http://.*: hidden_size: expected 64, got 128"),
        (stubs.FusedMoE, {"num_experts": 9}, "num_experts: expected 9, got 8"),
        (stubs.FusedMoE, {"top_k": 4}, "top_k: expected 4, got 2"),
    ],
)  # fmt: skip
def test_layers_that_are_refused(kind: Any, changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        kind(**(ARGUMENTS | changed))


@pytest.mark.usefixtures("plugin")
def test_answers_with_shared_experts_are_refused(metadata: dict[str, Any]) -> None:
    metadata["shared_experts"] = "included"
    with pytest.raises(ValueError, match="shared_experts: expected false, as SGLang computes them, got true"):
        stubs.FusedMoE(**ARGUMENTS)


@pytest.mark.usefixtures("plugin", "metadata")
def test_a_method_around_the_servers_is_refused() -> None:
    stubs.state.wrap = lambda method: type("KTEPWrapperMethod", (ExpertdFusedMoEMethod,), {})(method.remote)
    try:
        with pytest.raises(ValueError, match="quant_method: expected the server's, got KTEPWrapperMethod"):
            stubs.FusedMoE(**ARGUMENTS)
    finally:
        del stubs.state.wrap


FULL, BREAKABLE = SimpleNamespace(backend="full"), SimpleNamespace(backend="breakable")
GRAPHS = "exec.graph.cuda_graph_config"


@pytest.mark.usefixtures("metadata")
@pytest.mark.parametrize(
    ("transport", "changed"),
    [
        ("auto", {}),
        ("device", {f"{GRAPHS}.decode": FULL}),
        ("device", {f"{GRAPHS}.decode": BREAKABLE}),
        ("device", {}),
        ("http", {"lora.enable_lora": True, "lora.lora_target_modules": ["q_proj", "o_proj"]}),
        ("http", {"model.load_format": "dummy"}),
    ],
)
def test_what_works(transport: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    make(transport, changed, monkeypatch)


@pytest.mark.usefixtures("metadata")
@pytest.mark.parametrize(
    ("transport", "changed", "text"),
    [
        ("auto", {f"{GRAPHS}.decode": FULL}, "decode CUDA graphs: expected disabled .*: device, got full"),
        ("channel", {f"{GRAPHS}.decode": BREAKABLE}, "decode CUDA graphs: expected disabled .*, got break"),
        ("device", {f"{GRAPHS}.prefill": BREAKABLE}, "prefill .*-backend-prefill=disabled.*, got breakable"),
        ("http", {f"{GRAPHS}.prefill": FULL}, "prefill CUDA graphs: expected disabled .*, got full"),
        ("auto", {"exec.moe.enable_eplb": True}, "enable_eplb: expected false, .*, got true"),
        ("auto", {"exec.moe.init_expert_location": "a.pt"}, "init_expert_location: expected trivial"),
        ("auto", {"a2a": stubs.MoeA2ABackend.DEEPEP}, "moe_a2a_backend: expected none, .*, got deepep"),
        ("auto", {"parallel.moe_ep_size": 2}, "ep_size: expected 1, .*, got 2"),
        ("auto", {"is_scattered": True}, "tokens of a layer: expected all on each rank, got a part on each"),
        ("auto", {"exec.overlap.enable_two_batch_overlap": True}, "enable_two_batch_overlap: expected false"),
        ("auto", {"exec.graph.enable_torch_compile": True}, "enable_torch_compile: expected false"),
        ("auto", {"flags.moe.in_speculative_scope": True}, "draft model: expected one without routed"),
        ("auto", {"model.load_format": "gguf"}, "load_format: expected auto or .*, got gguf"),
        ("auto", {"model.startup_weight_load_mode": "overlap"}, "mode: expected serial, got overlap"),
        ("auto", {"lora.enable_lora": True}, "lora_target_modules: expected those .*, got None"),
        (
            "auto",
            {"lora.lora_paths": ["a"], "lora.lora_target_modules": ["q_proj", "gate_up_proj"]},
            "lora_target_modules: expected those of attention, named, got .*gate_up_proj",
        ),
        ("auto", {"lora.enable_lora": True, "lora.lora_target_modules": ["all"]}, "got .'all'"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(
    transport: str, changed: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=text):
        make(transport, changed, monkeypatch)


def make(transport: str, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer with this transport, and SGLang's state changed where the paths say."""
    use(monkeypatch, f'{{"url": "{URL}", "transport": "{transport}"}}')
    for path, value in changed.items():
        *owners, name = path.split(".")
        owner = stubs.state
        for each in owners:
            owner = getattr(owner, each)
        setattr(owner, name, value)
    stubs.FusedMoE(**ARGUMENTS)
