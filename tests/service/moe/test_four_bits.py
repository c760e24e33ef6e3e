"""Layers whose experts have four bits: alone, in the host's memory, and what they take of it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expertd.backends import BACKENDS
from expertd.kernels import decode
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.kernels.ops.activation import SILU
from expertd.kernels.ops.four_bits import format_of, tensors_of
from expertd.service.engine import layers
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.needs import needs_of, weights_bytes
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import MATRICES, check_weights, cut, random_weights, save_weights
from expertd.weight_format import FP8_BLOCKS, WeightFormat, WeightLayout
from tests.kernels.helpers import diff, expected_experts, fresh_generator
from tests.kernels.test_fused_experts import BF16_TOLERANCE
from tests.service.apps import tiny_settings
from tests.service.moe.stored import FOUR_BITS as LAYOUTS
from tests.service.moe.stored import stores_and_whole
from tests.service.moe.unpacking import Unpacking

each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
SHAPE = LayerShape(hidden_size=256, intermediate_size=128, num_experts=20, top_k=3, num_shared_experts=1)


def shapes_of(layout: WeightLayout) -> tuple[LayerShape, LayerShape]:
    """SHAPE with four bits throughout, and with shared experts in FP8."""
    routed = replace(SHAPE, weight_layout=layout)
    return replace(routed, shared_layout=layout), routed


@each_layout
def test_the_bytes_are_those_of_the_tensors(layout: WeightLayout) -> None:
    for shape in shapes_of(layout):
        weights = random_weights(shape, 0, "cpu")
        check_weights(shape, weights)
        routed, shared = cut(weights, SHAPE.num_experts)
        for part, each in ((routed, shape.expert_bytes), (shared, shape.shared_expert_bytes)):
            tensors = [tensor for name in MATRICES for tensor in tensors_of(part.matrix(name))]
            assert sum(tensor.nbytes for tensor in tensors) == each * part.down.data.shape[0]
        assert weights_bytes(shape) == weights.num_bytes + 2 * weights.router.numel()  # which may be fp32
        assert layout.data_bytes(7, 64) == FP8_BLOCKS.data_bytes(7, 64) // 2


@each_layout
def test_a_packed_layer_holds_bf16_and_scales(layout: WeightLayout) -> None:
    plain, fp8 = replace(SHAPE, num_shared_experts=0), 3 * 20 * 256 * 128
    shape = replace(plain, weight_layout=layout)
    in_bf16 = needs_of(shape, 16, BACKENDS["reference"]).weights
    assert in_bf16 - (weights_bytes(shape) - fp8 // 2) == 2 * fp8 + 20 * 256 * 6
    kept = needs_of(shape, 16, BACKENDS["reference"], keeps_given=True).weights
    assert kept == in_bf16 + fp8 // 2
    most = (
        0.6 if layout.format is WeightFormat.MXFP4 else 0.7
    )  # scales are kept beside the copy that has them
    here, in_fp8 = (needs_of(each, 16, BACKENDS["hopper"]).weights for each in (shape, plain))
    assert here < most * in_fp8


@each_layout
def test_a_layer_computes_what_its_weights_mean(layout: WeightLayout) -> None:
    generator = fresh_generator()
    tokens = torch.randn(9, SHAPE.hidden_size, generator=generator).to(torch.bfloat16)
    for shape in shapes_of(layout):
        weights = random_weights(shape, generator.initial_seed() % 1000, "cpu")
        layer = MoELayer(shape, weights, ReferenceBackend())
        ids, topk_weights = layer.route(tokens)
        routed, shared = cut(weights, SHAPE.num_experts)
        assert format_of(routed.down) is layout.format
        expected = expected_experts(tokens, ids, topk_weights, routed.gate_up, routed.down, SILU, None)
        every = torch.zeros(9, 1, dtype=torch.int32), torch.ones(9, 1)
        expected += expected_experts(tokens, *every, shared.gate_up, shared.down, SILU, None)
        out = layer(tokens)
        assert diff(out, expected) < BF16_TOLERANCE
        for name in MATRICES:
            layer.pack(name)
        assert all(layer.weights.matrix(name).data.is_meta for name in MATRICES)
        assert torch.equal(layer(tokens), out)


@each_layout
def test_an_expert_is_the_same_whichever_others_are_held(layout: WeightLayout) -> None:
    for shape in shapes_of(layout):
        whole, part = random_weights(shape, 3, "cpu"), random_weights(shape, 3, "cpu", [7, 2, 7])
        for name in MATRICES:
            kept = decode(part.matrix(name))
            assert torch.equal(kept[:3], decode(whole.matrix(name))[[7, 2, 7]])
            (shared, of_part) = (cut(w, len(w.down.data) - (w.shared is None))[1] for w in (whole, part))
            assert torch.equal(decode(shared.matrix(name)), decode(of_part.matrix(name)))


@each_layout
def test_experts_in_the_hosts_memory_have_the_bits_of_whole_layers(layout: WeightLayout) -> None:
    generator = fresh_generator()
    for shape in shapes_of(layout):
        (made,) = stores_and_whole(shape, 5, ReferenceBackend(), "cpu", [generator.initial_seed() % 1000])
        store, layer, whole = made
        for tokens in (1, 4, 0, 2, 3):
            given = torch.randn(tokens, SHAPE.hidden_size, generator=generator)
            offsets, expected = (torch.full((22,), -1, dtype=torch.int32) for _ in range(2))
            out = layer(given, offsets=offsets)
            assert torch.equal(out, whole(given, offsets=expected))
            assert torch.equal(offsets[:21], expected[:21])
        assert store.counts.num_bytes == store.counts.misses * shape.expert_bytes > 0


def test_only_fp8_is_saved(tmp_path: Path) -> None:
    weights = random_weights(shapes_of(LAYOUTS["MXFP4"])[0], 0, "cpu")
    with pytest.raises(ValueError, match="weights: expected FP8, got MXFP4"):
        save_weights(tmp_path / "layer.safetensors", weights)


def test_weights_that_cannot_be_packed_are_refused_by_their_models_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = replace(SHAPE, weight_layout=LAYOUTS["MXFP4"], shared_layout=LAYOUTS["MXFP4"])
    weights = random_weights(shape, 0, "cpu")
    weights.down.scales[7, 3, 1] = 127 + 90
    monkeypatch.setattr(layers, "layer_of", lambda *_: MoELayer(shape, weights, Unpacking()))
    (model,) = tiny_settings().models
    expected = r"^model tiny: weights scales: expected at most .* group 7 \(requantize: always serves"
    with pytest.raises(ValueError, match=expected):
        layers.packed_layer_of(model, Unpacking(), torch.device("cpu"), lambda: False)
