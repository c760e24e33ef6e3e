"""Routing and the order that brings the rows of one expert together."""

import pytest
import torch

from service.moe.routing import sort_by_expert, top_k_softmax
from tests.kernels.helpers import fresh_generator
from tests.moe.reference_layer import reference_routing


@pytest.mark.parametrize("renormalize", [True, False])
def test_routing_is_the_references(renormalize: bool) -> None:
    generator = fresh_generator()
    hidden, router = torch.randn(9, 128, generator=generator), torch.randn(20, 128, generator=generator) / 11
    topk_ids, topk_weights = top_k_softmax(hidden @ router.t(), 4, renormalize)
    assert topk_ids.dtype == torch.int32
    assert topk_weights.dtype == torch.float32
    assert topk_weights.is_contiguous()
    for token in range(9):
        expected = reference_routing(hidden[token], router, 4, renormalize)
        assert topk_ids[token].tolist() == list(expected)
        assert topk_weights[token].tolist() == pytest.approx(list(expected.values()), rel=1e-4)


def test_equal_scores_go_to_the_lower_expert() -> None:
    logits = torch.zeros(300, 50)
    logits[:, 40] = 1
    topk_ids, topk_weights = top_k_softmax(logits, 4, renormalize=True)
    assert topk_ids.tolist() == [[40, 0, 1, 2]] * 300
    assert torch.allclose(topk_weights.sum(1), torch.ones(300))


def test_a_token_of_nan_gets_different_experts_and_nan_weights() -> None:
    logits = torch.zeros(2, 8)
    logits[1] = torch.nan
    topk_ids, topk_weights = top_k_softmax(logits, 3, renormalize=True)
    assert len(set(topk_ids[1].tolist())) == 3
    assert topk_weights[0].isfinite().all()
    assert topk_weights[1].isnan().all()


def test_order_keeps_every_pair_and_the_tokens_order() -> None:
    topk_ids = torch.rand(31, 10, generator=fresh_generator()).argsort(1)[:, :4].to(torch.int32)
    order = sort_by_expert(topk_ids, num_experts=12)
    counts = [int((topk_ids == expert).sum()) for expert in range(12)]
    assert order.counts.tolist() == counts
    assert order.offsets.tolist() == [sum(counts[:expert]) for expert in range(13)]
    assert order.offsets.dtype == torch.int32
    assert order.offsets.is_contiguous()
    for token in range(31):
        for slot in range(4):
            row = order.rows[token, slot]
            assert order.tokens[row] == token
            assert order.experts[row] == topk_ids[token, slot]
    for expert in range(12):
        own = slice(int(order.offsets[expert]), int(order.offsets[expert + 1]))
        assert order.tokens[own].tolist() == sorted(order.tokens[own].tolist())
        assert order.positions[own].tolist() == list(range(counts[expert]))
