"""The permutation that brings the rows of each expert together."""

import pytest
import torch

from expertd.kernels import Quantized, compute_permutation, permute_rows, quantize_rows
from tests.kernels.helpers import fresh_generator


def test_the_permutation_has_every_pair_in_token_order() -> None:
    topk_ids = torch.rand(31, 10, generator=fresh_generator()).argsort(1)[:, :4].to(torch.int32)
    permutation = compute_permutation(topk_ids, num_groups=12)
    counts = [int((topk_ids == expert).sum()) for expert in range(12)]
    assert permutation.counts.tolist() == counts
    assert permutation.offsets.tolist() == [sum(counts[:expert]) for expert in range(13)]
    assert permutation.offsets.dtype == torch.int32
    assert permutation.offsets.is_contiguous()
    for token in range(31):
        for slot in range(4):
            row = permutation.inverse[token, slot]
            assert permutation.token_ids[row] == token
            assert permutation.group_ids[row] == topk_ids[token, slot]
    for expert in range(12):
        own = slice(int(permutation.offsets[expert]), int(permutation.offsets[expert + 1]))
        assert permutation.token_ids[own].tolist() == sorted(permutation.token_ids[own].tolist())
        assert permutation.positions[own].tolist() == list(range(counts[expert]))


@pytest.mark.parametrize("none", [3, -1, 4, -(2**31), 2**31 - 1])
def test_pairs_without_a_group_come_last(none: int) -> None:
    group_ids = torch.tensor([[none, 0], [1, none], [none, -1]], dtype=torch.int32)
    permutation = compute_permutation(group_ids, num_groups=3)
    assert permutation.offsets.tolist() == [0, 1, 2, 2]
    assert permutation.token_ids[:2].tolist() == [0, 1]
    assert permutation.group_ids.tolist() == [0, 1, 3, 3, 3, 3]
    assert sorted(permutation.inverse.flatten().tolist()) == list(range(6))
    assert permutation.absent is not None
    assert permutation.absent.tolist() == [[True, False], [False, True], [True, True]]
    assert compute_permutation(torch.empty(0, 2, dtype=torch.int32), 3).offsets.tolist() == [0, 0, 0, 0]


def test_rows_may_begin_anywhere_in_their_storage() -> None:
    rows = quantize_rows(torch.randn(5, 256, generator=fresh_generator()))
    elsewhere = torch.zeros(rows.data.numel() + 1, dtype=torch.uint8)[1:].view(rows.data.dtype).view(5, 256)
    elsewhere.copy_(rows.data)
    token_ids = torch.tensor([4, 0, 0, 3])
    permuted = permute_rows(Quantized(elsewhere, rows.scales), token_ids)
    assert torch.equal(permuted.data.view(torch.uint8), rows.data.view(torch.uint8)[token_ids])
    assert torch.equal(permuted.scales, rows.scales[token_ids])
