"""A checkpoint read onto a GPU: the same bits as on a CPU, and a correct layer."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from expertd.kernels import quantize_blocks, resolve_backend
from expertd.service.checkpoints import models_of
from expertd.service.checkpoints.weights import read_layer
from expertd.service.engine.layers import layer_of
from expertd.service.moe.layer import MoELayer
from expertd.service.settings.served import CheckpointSettings
from tests.kernels.helpers import fresh_generator
from tests.service.checkpoints import layouts
from tests.service.moe.reference_layer import assert_close, reference_layer

pytestmark = pytest.mark.gpu

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 512, 256, 8, 2
MATRICES = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}


def write(directory: Path, *, fp8: bool) -> None:
    """Layer 0 of a model with softmax routing and no shared expert."""
    generator = fresh_generator()

    def normal(n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=generator).mul_(k**-0.5).to(torch.bfloat16)

    prefix = "model.layers.0.mlp"
    tensors = {f"{prefix}.gate.weight": normal(EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        for name, (n, k) in MATRICES.items():
            weight, name = normal(n, k), f"{prefix}.experts.{expert}.{name}.weight"
            if fp8:
                weight, tensors[f"{name}_scale_inv"] = quantize_blocks(weight)
            tensors[name] = weight
    save_file(tensors, directory / "model.safetensors")
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": HIDDEN, "norm_topk_prob": True,
        "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))


def load(directory: Path, backend: str, device: str) -> MoELayer:
    (model,) = models_of(CheckpointSettings(path=directory, layers="0"))
    return layer_of(model, resolve_backend(backend), torch.device(device), lambda: False)


@pytest.mark.parametrize("fp8", [True, False])
def test_a_checkpoint_is_the_same_on_a_gpu(fp8: bool, tmp_path: Path) -> None:
    write(tmp_path, fp8=fp8)
    here, there = load(tmp_path, "reference", "cpu"), load(tmp_path, "hopper", "cuda")
    for ours, theirs in (
        (here.weights.gate_up, there.weights.gate_up),
        (here.weights.down, there.weights.down),
    ):
        assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8).cpu())
        assert torch.equal(ours.scales, theirs.scales.cpu())
    hidden_states = torch.randn(40, HIDDEN, generator=fresh_generator()).to("cuda", torch.bfloat16)
    assert_close(there(hidden_states), reference_layer(hidden_states, there.weights, TOP_K))


@pytest.mark.parametrize(
    ("encoding", "layout"),
    [
        ("nvfp4", "transposed"),
        ("int4", "a tensor each"),
        ("mxfp8", "three stacks"),
        ("fp8 by row", "two stacks"),
        ("fp8 by tensor", "in turns"),
    ],
)
def test_other_encodings_are_the_same_on_a_gpu(encoding: str, layout: str, tmp_path: Path) -> None:
    layouts.write(tmp_path, encoding, layout)
    (model,) = models_of(CheckpointSettings(path=tmp_path, layers="0", requantize="allow"))
    here, there = (read_layer(model.source, device, lambda _: None) for device in ("cpu", "cuda"))
    for ours, theirs in ((here.gate_up, there.gate_up), (here.down, there.down)):
        assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8).cpu())
        assert torch.equal(ours.scales, theirs.scales.cpu())


def test_parts_of_a_layer_add_up_to_it(tmp_path: Path) -> None:
    write(tmp_path, fp8=True)
    hidden_states = torch.randn(40, HIDDEN, generator=fresh_generator()).to("cuda", torch.bfloat16)
    total = torch.zeros(40, HIDDEN, device="cuda")
    for experts in ("0-2", "3-3", "4-7"):
        (model,) = models_of(CheckpointSettings(path=tmp_path, layers="0", experts=experts))
        total += layer_of(model, resolve_backend("hopper"), torch.device("cuda"), lambda: False)(
            hidden_states
        )
    whole = load(tmp_path, "hopper", "cuda")
    assert_close(total, reference_layer(hidden_states, whole.weights, TOP_K))
