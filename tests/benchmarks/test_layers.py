"""The benchmarks of layers without a GPU: the peers, and `benchmarks weights` on a small file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.layer import moe_layer, weights
from benchmarks.layer.moe_layer import difference
from benchmarks.layer.problem import LAYERS, Layer, LayerProblem, LayerWeights
from benchmarks.lib.markdown import NOT_MEASURED
from benchmarks.peers import LayerPeer, torch_layer, vllm_triton
from benchmarks.peers import sglang as sglang_peers
from benchmarks.report import SECTIONS
from expertd.kernels import Quantized
from expertd.service.checkpoints import models_of
from expertd.service.checkpoints.weights import read_layer
from expertd.service.settings.served import CheckpointSettings

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


def test_torch_computes_the_layer(problem: LayerProblem) -> None:
    def dequantized(weights: Quantized) -> Tensor:
        return weights.data.double() * weights.scales.repeat_interleave(128, 1).repeat_interleave(128, 2)

    gate_up, down = dequantized(problem.weights.gate_up), dequantized(problem.weights.down)
    wanted = torch.zeros(TOKENS, LAYER.hidden_size, dtype=torch.float64)
    for token, (experts, shares) in enumerate(zip(problem.topk_ids, problem.topk_weights, strict=True)):
        for expert, weight in zip(experts.tolist(), shares.tolist(), strict=True):
            gate, up = (gate_up[expert] @ problem.hidden_states[token].double()).chunk(2)
            wanted[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    assert difference(torch_layer.prepare(problem)(), wanted) < 1e-4


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


SMALL = (256, 128, 8)


def test_the_checkpoint_is_a_layer_without_nans(tmp_path: Path) -> None:
    file = weights.make(tmp_path, SMALL)
    (model,) = models_of(CheckpointSettings(path=tmp_path, layers="1"))
    read = read_layer(model.source, "cpu", lambda _: None)
    assert len(read.gate_up.data) == 8 + 1
    assert read.gate_up.data.view(torch.uint8).flatten().bincount().count_nonzero() > 100, (
        "random numbers, which no storage shortens"
    )
    assert file.stat().st_size > 3 * 9 * 256 * 128


def test_each_way_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(weights.SIZES, "deepseek-v3", SMALL)
    file = tmp_path / "weights-cpu.json"
    options = ["--sizes", "deepseek-v3", "--rounds", "2", "--directory", str(tmp_path), "--json", str(file)]
    assert weights.main(options) == 0
    content = json.loads(file.read_text())
    ways = {row["way"] for row in content["rows"]}
    assert {"expertd", "safetensors", "dd"} <= ways
    assert len(content["rows"]) == 2 * len(ways), "cold and warm"
    assert all(0 < row["low"] <= row["GB/s"] <= row["high"] for row in content["rows"])
    assert "sizes deepseek-v3  cache cold  way expertd  GB/s " in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == [file.name], "the checkpoint is removed"
    shown = SECTIONS["weights"](tmp_path)
    assert len(shown.splitlines()) == 2 + len(ways - {"around the page cache", "dd iflag=direct"})
    assert content["about"]["machine"] in SECTIONS["weights-machine"](tmp_path).replace("\n", " ")
