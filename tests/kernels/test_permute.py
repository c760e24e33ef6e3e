"""The order that brings the rows of one expert together."""

import torch

from expertd.kernels import sort_by_group
from tests.kernels.helpers import fresh_generator


def test_order_keeps_every_pair_and_the_tokens_order() -> None:
    topk_ids = torch.rand(31, 10, generator=fresh_generator()).argsort(1)[:, :4].to(torch.int32)
    order = sort_by_group(topk_ids, num_groups=12)
    counts = [int((topk_ids == expert).sum()) for expert in range(12)]
    assert order.counts.tolist() == counts
    assert order.offsets.tolist() == [sum(counts[:expert]) for expert in range(13)]
    assert order.offsets.dtype == torch.int32
    assert order.offsets.is_contiguous()
    for token in range(31):
        for slot in range(4):
            row = order.rows[token, slot]
            assert order.tokens[row] == token
            assert order.groups[row] == topk_ids[token, slot]
    for expert in range(12):
        own = slice(int(order.offsets[expert]), int(order.offsets[expert + 1]))
        assert order.tokens[own].tolist() == sorted(order.tokens[own].tolist())
        assert order.positions[own].tolist() == list(range(counts[expert]))


def test_pairs_of_no_group_come_last_and_belong_to_none() -> None:
    group_ids = torch.tensor([[3, 0], [1, 3], [3, 3]], dtype=torch.int32)
    order = sort_by_group(group_ids, num_groups=3)
    assert order.offsets.tolist() == [0, 1, 2, 2]
    assert order.tokens[:2].tolist() == [0, 1]
    assert sorted(order.rows.flatten().tolist()) == list(range(6))
