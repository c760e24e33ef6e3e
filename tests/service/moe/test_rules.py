"""Layers whose experts follow other rules than silu(gate) * up, on a CPU."""

import gc
import weakref
from dataclasses import replace
from operator import itemgetter

import pytest
import torch

from expertd.activation import COMMON
from expertd.kernels import Routing, resolve_backend
from expertd.kernels.ops.four_bits import mapped
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import MATRICES
from tests.kernels.helpers import diff, fresh_generator
from tests.service.moe.reference_rules import RULES, SHAPE, expected, gated_weights
from tests.short import few_of

TOKENS = 40


def hidden_states() -> torch.Tensor:
    return torch.randn(TOKENS, SHAPE.hidden_size, generator=fresh_generator()).to(torch.bfloat16)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_is_followed(rule: str) -> None:
    weights, tokens = gated_weights(), hidden_states()
    layer = MoELayer(SHAPE, weights, resolve_backend("reference"), rule=RULES[rule])
    ids, topk_weights = layer.route(tokens)
    theirs = expected(tokens, ids, topk_weights, weights, RULES[rule])
    assert diff(layer(tokens), theirs) < 2e-4
    if rule != "common":
        assert diff(expected(tokens, ids, topk_weights, weights, COMMON), theirs) > 1e-3
    out = torch.empty(TOKENS, SHAPE.hidden_size, dtype=torch.bfloat16)
    offsets = torch.zeros(SHAPE.num_groups + 1, dtype=torch.int32)
    assert layer(tokens, ids, topk_weights, out=out, offsets=offsets) is out
    assert diff(out, theirs) < 2e-4
    counted = layer.tokens_per_expert(offsets.numpy())
    assert counted.tolist() == ids.flatten().bincount(minlength=SHAPE.num_experts).tolist()
    assert layer(tokens[:0]).shape == (0, SHAPE.hidden_size)


@pytest.mark.parametrize("rule", few_of(RULES, ["clamped after", "weighed input"]))
def test_a_packed_layer_gives_the_same_bits_without_fp8(rule: str) -> None:
    weights, tokens = gated_weights(), hidden_states()
    layer = MoELayer(SHAPE, weights, resolve_backend("reference"), rule=RULES[rule])
    before, watched = layer(tokens), [weakref.ref(weights.matrix(name).data) for name in MATRICES]
    del weights
    for name, data in zip(MATRICES, watched, strict=True):
        layer.pack(name)
        gc.collect()
        assert data() is None, "before the next one is packed"
    assert torch.equal(layer(tokens), before)
    assert layer.weights.num_bytes == gated_weights().num_bytes


@pytest.mark.parametrize("rule", RULES)
def test_parts_of_a_layer_add_up_to_it(rule: str) -> None:
    weights, tokens = gated_weights(), hidden_states()
    whole = MoELayer(SHAPE, weights, resolve_backend("reference"), rule=RULES[rule])
    total = torch.zeros(TOKENS, SHAPE.hidden_size)
    for held, groups in ((range(4), [0, 1, 2, 3, 6, 7]), (range(4, 6), [4, 5])):
        shape = replace(SHAPE, local_experts=held, num_shared_experts=len(groups) - len(held))
        gate_up, down = (mapped(matrix, itemgetter(groups)) for matrix in (weights.gate_up, weights.down))
        gate = weights.shared_gate if shape.num_shared_experts else None
        part = replace(weights, gate_up=gate_up, down=down, shared_gate=gate)
        total += MoELayer(shape, part, resolve_backend("reference"), rule=RULES[rule])(tokens)
    assert diff(total, whole(tokens)) < 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_slots_without_an_expert_add_nothing(rule: str) -> None:
    """Whatever their weights are; a shared expert is added to tokens without any."""
    layer = MoELayer(SHAPE, gated_weights(), resolve_backend("reference"), rule=RULES[rule])
    tokens = hidden_states()
    ids, weights = layer.route(tokens)
    empty = torch.rand(ids.shape, generator=fresh_generator()) < 0.5
    empty[0], empty[1] = True, False
    given = ids.masked_fill(empty, -1), weights.masked_fill(empty, torch.nan)
    out = layer(tokens, *given)
    wanted = expected(tokens, ids, weights.masked_fill(empty, 0), layer.weights, RULES[rule])
    assert diff(out, wanted) < 1e-3


def test_the_gate_is_that_of_the_shared_experts_in_the_masked_layout() -> None:
    weights, tokens = gated_weights(), hidden_states()
    masked = MoELayer(SHAPE, weights, resolve_backend("reference"), masked_max_tokens=TOKENS)
    ids, topk_weights = masked.route(tokens)
    assert diff(masked(tokens), expected(tokens, ids, topk_weights, weights, COMMON)) < 2e-3


def test_the_masked_layout_needs_the_common_rule() -> None:
    for rule in ("clamped", "routed clamped", "weighed input"):
        with pytest.raises(
            ValueError, match="masked_max_tokens: expected 0 with this rule of the experts, got 8"
        ):
            MoELayer(
                SHAPE, gated_weights(), resolve_backend("reference"), rule=RULES[rule], masked_max_tokens=8
            )


def test_a_gate_needs_a_shared_expert() -> None:
    shape = LayerShape(SHAPE.hidden_size, SHAPE.intermediate_size, 8, 3)
    with pytest.raises(ValueError, match="shared_gate: expected none without shared experts, got one"):
        MoELayer(shape, gated_weights(), resolve_backend("reference"))


@pytest.mark.parametrize(
    "routing",
    [Routing("sqrtsoftplus", True, 1.5), Routing("softmax", False, 2.0, 3, 2, "best")],
)
def test_rules_of_routing_that_no_kernel_has(routing: Routing) -> None:
    layer = MoELayer(SHAPE, gated_weights(), resolve_backend("reference"), routing=routing)
    tokens = hidden_states().double()
    ids, weights = layer.route(tokens.to(torch.bfloat16))
    logits = tokens @ layer.weights.router.double().t()
    if routing.scoring_func == "softmax":
        scores = logits.exp() / logits.exp().sum(1, keepdim=True)
    else:
        scores = (1 + logits.exp()).log().sqrt()
    for token in range(TOKENS):
        row = scores[token].tolist()
        allowed = list(range(6))
        if routing.topk_group < routing.num_expert_groups:
            groups = sorted(range(3), key=lambda g: -max(row[2 * g : 2 * g + 2]))[:2]
            allowed = [expert for expert in allowed if expert // 2 in groups]
        best = sorted(allowed, key=lambda expert: -row[expert])[:3]
        total = sum(row[expert] for expert in best) if routing.renormalize else 1.0
        assert ids[token].tolist() == best
        theirs = torch.tensor([row[expert] / total * routing.routed_scaling_factor for expert in best])
        torch.testing.assert_close(weights[token], theirs, rtol=1e-5, atol=0)
