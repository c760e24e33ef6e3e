"""A layer with its experts on a server, `expertd serve`: outputs are the checkpoint's in float64."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import stubs
from tests.conftest import use
from tests.serving import serving

TOKENS, HIDDEN, SIZE, NUM_EXPERTS, TOP_K, LAYERS = 23, 128, 128, 8, 2, 2
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
    "moe_intermediate_size": SIZE, "num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K,
    "num_hidden_layers": LAYERS, "norm_topk_prob": True, "hidden_act": "silu", "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """Of the checkpoint."""
    shapes = {"gate": (SIZE, HIDDEN), "up": (SIZE, HIDDEN), "down": (HIDDEN, SIZE)}
    found = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": _exact(shape)
        for layer in range(LAYERS)
        for expert in range(NUM_EXPERTS)
        for name, shape in shapes.items()
    }
    for layer in range(LAYERS):
        found[f"model.layers.{layer}.mlp.gate.weight"] = torch.randn(NUM_EXPERTS, HIDDEN).bfloat16()
    return found


def _exact(shape: tuple[int, int]) -> Tensor:
    """Random numbers that the server's FP8 holds: FP8 times a power of 2, with its largest in each block."""
    numbers = (torch.randn(shape) * 100).clamp(-448, 448)
    numbers[::64, ::64] = 448
    return numbers.to(torch.float8_e4m3fn).bfloat16() * 2.0**-11


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Tensor]) -> Path:
    directory = tmp_path_factory.mktemp("small")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a server with the checkpoint's layers."""
    with serving(checkpoint, tmp_path_factory.mktemp("server")) as url:
        yield url


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["http", "channel"])
def test_outputs_are_those_of_the_checkpoint(
    transport: str,
    url: str,
    checkpoint: Path,
    tensors: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of all layers and three tensor parallel ranks, in requests of 5 tokens, with padding.

    Which way they go is in the log: SGLang sets the root logger's level and handlers.
    """
    caplog.set_level(logging.INFO)
    stubs.state.model.model_path = str(checkpoint)
    stubs.state.parallel.moe_tp_size = 3
    use(monkeypatch, json.dumps({"url": url, "transport": transport, "max_tokens": 5}))
    made = [[make(number, rank) for number in range(LAYERS)] for rank in range(3)]
    for number in range(LAYERS):
        x = torch.randn(TOKENS, HIDDEN).bfloat16()
        logits = torch.randn(TOKENS, NUM_EXPERTS)
        weights, ids = logits.softmax(-1).topk(TOP_K)
        ids[-3:] = -1
        topk = stubs.StandardTopKOutput(weights, ids, logits)
        total = torch.stack([layers[number](x, topk).double() for layers in made]).sum(0)
        expected = expected_of(tensors, number, x, ids, weights)
        assert not total[-3:].any()
        error = (total - expected).norm() / expected.norm()
        assert error < 0.01, error
    assert caplog.text.count("expertd: calls go over a channel") == (transport == "channel")


def make(number: int, rank: int) -> Any:
    stubs.state.parallel.moe_tp_rank = rank
    return stubs.FusedMoE(
        num_experts=NUM_EXPERTS, hidden_size=HIDDEN, intermediate_size=SIZE, layer_id=number, top_k=TOP_K,
        prefix=f"model.layers.{number}.mlp.experts",
    )  # fmt: skip


def expected_of(
    tensors: dict[str, Tensor], number: int, x: Tensor, topk_ids: Tensor, topk_weights: Tensor
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, weights) in enumerate(zip(topk_ids.tolist(), topk_weights.tolist(), strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            if expert >= 0:
                name, row = f"model.layers.{number}.mlp.experts.{expert}.{{}}_proj.weight", x[token].double()
                gate, up, down = (tensors[name.format(each)].double() for each in ("gate", "up", "down"))
                out[token] += weight * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
    return out
