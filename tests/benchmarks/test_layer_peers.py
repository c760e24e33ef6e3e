"""The peers of the layer benchmark, as far as they can be tried without a GPU and their packages."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.layer import moe_layer
from benchmarks.layer.moe_layer import difference
from benchmarks.layer.problem import LAYERS, Layer, LayerProblem, LayerWeights
from benchmarks.lib.markdown import NOT_MEASURED
from benchmarks.peers import LayerPeer, torch_layer, vllm_triton
from benchmarks.peers import sglang as sglang_peers
from benchmarks.report import SECTIONS
from expertd.kernels import Quantized

LAYER = Layer("invented", 256, 128, 4, 2)
TOKENS = 5


def quantized(*shape: int) -> Quantized:
    data = torch.randn(shape).to(torch.float8_e4m3fn)
    return Quantized(data, torch.rand(shape[0], shape[1] // 128, shape[2] // 128) * 0.05 + 0.05)


@pytest.fixture
def problem() -> LayerProblem:
    torch.manual_seed(1)
    h, i, experts = LAYER.hidden_size, LAYER.intermediate_size, LAYER.num_experts
    weights = LayerWeights(quantized(experts, 2 * i, h), quantized(experts, h, i))
    hidden_states = torch.randn(TOKENS, h).bfloat16()
    topk_ids = torch.rand(TOKENS, experts).argsort(dim=1)[:, : LAYER.top_k].int().contiguous()
    topk_weights = torch.rand(TOKENS, LAYER.top_k)
    out = torch.empty_like(hidden_states)
    return LayerProblem(LAYER, weights, hidden_states, topk_ids, topk_weights, out)


def package(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Install modules with these attributes, by name with `__` for a dot; their parents are empty."""
    for name, attributes in modules.items():
        parts = name.split("__")
        for length in range(1, len(parts) + 1):
            full = ".".join(parts[:length])
            if not isinstance(sys.modules.get(full), ModuleType):
                module = ModuleType(full)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, full, module)
        for key, value in attributes.items():
            monkeypatch.setattr(sys.modules[".".join(parts)], key, value, raising=False)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """SGLang's functions that only note what they get."""
    given: dict[str, Any] = {}

    def note(*arguments: Any, **options: Any) -> str:
        given.update(arguments=arguments, options=options)
        return "out"

    def configs(*key: object) -> dict[int, Any] | None:
        return {1: {}} if key == (4, 128, "fp8_w8a8", 128, 128) else None

    triton = {"fused_experts": note}
    package(
        monkeypatch,
        sglang__srt__server_args={"set_global_server_args_for_scheduler": lambda a: given.update(server=a)},
        sglang__srt__layers__moe__moe_runner={"MoeRunnerConfig": dict},
        sglang__srt__layers__moe__moe_runner__triton_utils=triton,
        sglang__srt__layers__moe__moe_runner__triton_utils__fused_moe_triton_config={
            "get_moe_configs": configs
        },
        sglang__srt__layers__moe__cutlass_moe={"cutlass_fused_experts_fp8": note},
    )
    sglang_peers.set_up.cache_clear()
    return given


def test_torch_computes_the_layer(problem: LayerProblem) -> None:
    def dequantized(weights: Quantized) -> Tensor:
        return weights.data.double() * weights.scales.repeat_interleave(128, 1).repeat_interleave(128, 2)

    gate_up, down = dequantized(problem.weights.gate_up), dequantized(problem.weights.down)
    wanted = torch.zeros(TOKENS, LAYER.hidden_size, dtype=torch.float64)
    for token, (experts, weights) in enumerate(zip(problem.topk_ids, problem.topk_weights, strict=True)):
        for expert, weight in zip(experts.tolist(), weights.tolist(), strict=True):
            gate, up = (gate_up[expert] @ problem.hidden_states[token].double()).chunk(2)
            wanted[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    assert difference(torch_layer.prepare(problem)(), wanted) < 1e-4


def test_sglangs_triton_layer_gets_its_arguments(problem: LayerProblem, sglang: dict[str, Any]) -> None:
    assert sglang_peers.prepare_triton(problem)() == "out"
    hidden_states, w1, w2, routing, config = sglang["arguments"]
    assert hidden_states is problem.hidden_states
    assert (w1.shape, w2.shape) == ((4, 256, 256), (4, 256, 128))
    assert routing[0] is problem.topk_weights
    assert routing[1] is problem.topk_ids
    assert config == {"num_experts": 4, "num_local_experts": 4, "inplace": False}
    assert sglang["options"]["w2_scale"].shape == (4, 2, 1)
    assert not sglang["server"].enable_deterministic_inference
    assert sglang_peers.tuned(LAYER)
    assert not sglang_peers.tuned(Layer("other", 256, 256, 4, 2))


def test_sglangs_cutlass_layer_gets_its_arguments(problem: LayerProblem, sglang: dict[str, Any]) -> None:
    assert sglang_peers.prepare_cutlass(problem)() == "out"
    hidden_states, w1, w2, w1_scales, w2_scales, topk_weights, topk_ids, *buffers = sglang["arguments"]
    assert hidden_states is problem.hidden_states
    assert (w1.shape, w2.shape) == ((4, 256, 256), (4, 128, 256))
    assert (w1_scales.shape, w2_scales.shape) == ((4, 2, 2), (4, 1, 2))
    assert (topk_weights.dtype, topk_ids.dtype) == (torch.float32, torch.int32)
    ab1, c1, ab2, c2, _, *pointers, offsets, sizes1, sizes2 = buffers
    assert [strides[0].item() for strides in (ab1, c1, ab2, c2)] == [256, 256, 128, 256]
    assert [pointer.shape for pointer in pointers] == [(4,)] * 5
    assert (offsets.shape, sizes1.shape, sizes2.shape) == ((5,), (4, 3), (4, 3))


def test_vllms_layer_gets_its_arguments(problem: LayerProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    package(
        monkeypatch,
        vllm__model_executor__layers__fused_moe={
            "fused_experts": lambda *a, quant_config: given.extend((a, quant_config))
        },
        vllm__model_executor__layers__fused_moe__config={"fp8_w8a8_moe_quant_config": lambda **k: k},
    )
    vllm_triton.prepare(problem)()
    (hidden_states, w1, w2, topk_weights, topk_ids), config = given
    assert hidden_states is problem.hidden_states
    assert (w1.shape, w2.shape) == ((4, 256, 256), (4, 256, 128))
    assert topk_weights is problem.topk_weights
    assert topk_ids is problem.topk_ids
    assert config["block_shape"] == [128, 128]
    assert config["w1_scale"] is problem.weights.gate_up.scales


def test_layers_that_are_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sglang_peers, vllm_triton):
        monkeypatch.setattr(module, "find_spec", lambda _: None)
    assert [peer.name for peer in peers.available_layer_peers()] == ["PyTorch bf16"]


def peer(name: str, prepare: Callable[[LayerProblem], Callable[[], Tensor]], tuned: Any = None) -> LayerPeer:
    return LayerPeer(name, lambda: True, lambda: f"{name} 1.0", prepare, tuned)


def test_a_layer_that_fails_does_not_end_the_run(
    problem: LayerProblem, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(problem: LayerProblem) -> Callable[[], Tensor]:
        raise ValueError("no such shape\nat line 1")

    monkeypatch.setattr(moe_layer, "graph_of", lambda call: call)
    right = torch_layer.prepare(problem)
    monkeypatch.setattr(LayerProblem, "run", lambda self: right())
    others = [
        peer("right", lambda _: right),
        peer("wrong", lambda _: lambda: 2 * right()),
        peer("no", refuse),
    ]
    graphs, differences = moe_layer.prepare_peers(problem, others)
    assert list(graphs) == ["right"]
    assert differences == {"right": pytest.approx(0, abs=1e-12)}
    said = capsys.readouterr().out.splitlines()
    assert said[0].endswith("wrong: output: expected less than 0.005 from ours, got 2.0e-01")
    assert said[1].endswith("5 tokens no: no such shape")


def test_the_header_names_versions_and_tuned_layers(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(layer: Layer) -> bool:
        raise ImportError("no library")

    others = [
        peer("A", torch_layer.prepare),
        peer("B", torch_layer.prepare, lambda layer: layer.top_k == 2),
        peer("C", torch_layer.prepare, broken),
    ]
    assert moe_layer.about_peers(others, [LAYER, Layer("other", 256, 128, 4, 1)]) == {
        "A": {"version": "A 1.0"},
        "B": {"version": "B 1.0", "tuned": ["invented"]},
        "C": {"version": "C 1.0"},
    }
    assert capsys.readouterr().out == "C: no library\n"


def test_layers_in_the_documents(tmp_path: Path) -> None:
    name = LAYERS[0].name
    rows: list[dict[str, Any]] = [
        {"layer": name, "tokens": tokens, "us": 10.0, "activated_experts": tokens} | more
        for tokens, more in (
            (1, {"peers_us": {"A": 20.0, "B": 5.0}}),
            (16, {"peers_us": {"A": 80.0}}),
            (4096, {}),
        )
    ]
    about = {
        "copy_tbps": 4.0,
        "peers": {"A": {"version": "a 1", "tuned": ["a"]}, "B": {"version": "b 2", "tuned": []}},
    }
    result = tmp_path / "moe_layer-h200.json"
    result.write_text(json.dumps({"about": about, "rows": rows}))
    floor = [row["us"] / (row["activated_experts"] * 3 * 2048 * 7168 / 4e6) for row in rows[:2]]
    first, last = (f"{ratio:.2f}" for ratio in reversed(floor))
    header, _, short, *_, every, empty, versions = SECTIONS["layer-peers"](tmp_path).splitlines()
    assert header == "| tokens | the floor | A | B |"
    assert short.startswith("| 1 to 64 | ")
    assert short.endswith(f" ({first} to {last}) | 0.25 (0.12 to 0.50) | 2.00 (2.00 to 2.00) |")
    assert every.endswith("| 0.25 (0.12 to 0.50) | 2.00 (2.00 to 2.00) |")
    assert (empty, versions) == ("", "A: a 1, tuned for a; B: b 2, tuned for none of these layers.")
    result.write_text(json.dumps({"about": {}, "rows": rows[2:]}))
    assert SECTIONS["layer-peers"](tmp_path) == NOT_MEASURED
