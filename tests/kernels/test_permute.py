"""The permutation that brings the rows of each expert together, and the weighted sum of a token's rows."""

import pytest
import torch
from torch import Tensor

from expertd.kernels import Quantized, compute_permutation, permute_rows, quantize_rows, unpermute_rows
from expertd.kernels.backends.reference.backend import ReferenceBackend
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


def _case(num_tokens: int, num_slots: int, h: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows bf16 [T * top_k, H], an inverse permutation [T, top_k] of them, and weights [T, top_k]."""
    generator = fresh_generator()
    num_rows = num_tokens * num_slots
    rows = torch.randn(num_rows, h, generator=generator).to(torch.bfloat16)
    inverse_permutation = torch.randperm(num_rows, generator=generator).view(num_tokens, num_slots)
    return rows, inverse_permutation, torch.randn(num_tokens, num_slots, generator=generator)


@pytest.mark.parametrize("size", [(1, 1, 128), (5, 4, 256), (700, 3, 1024)])  # the last in chunks
def test_sums_are_weighted_and_in_the_order_of_slots(size: tuple[int, int, int]) -> None:
    rows, inverse_permutation, weights = _case(*size)
    out, expected = unpermute_rows(rows, inverse_permutation, weights), torch.zeros(size[0], size[2])
    for slot in range(size[1]):
        expected = torch.addcmul(expected, rows[inverse_permutation[:, slot]].float(), weights[:, slot, None])
    assert out.dtype == torch.float32
    assert torch.equal(out, expected)


@pytest.mark.parametrize("size", [(5, 4, 256), (700, 3, 1024)])
def test_absent_pairs_add_nothing_whatever_they_hold(size: tuple[int, int, int]) -> None:
    rows, inverse_permutation, weights = _case(*size)
    absent = torch.rand(weights.shape, generator=fresh_generator()) < 0.5
    absent[0], absent[1] = True, False
    present = weights.masked_fill(absent, 0)
    expected = unpermute_rows(rows, inverse_permutation, present)
    rows[inverse_permutation[absent]] = torch.nan
    out = unpermute_rows(rows, inverse_permutation, weights.masked_fill(absent, torch.inf), absent)
    assert torch.equal(out, expected)
    assert not out[0].any()
    assert out[1].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_backends_sum_leaves_out_rows_of_minus_one(dtype: torch.dtype) -> None:
    rows, inverse_permutation, weights = _case(5, 4, 256)
    absent = torch.rand(weights.shape, generator=fresh_generator()) < 0.5
    out = torch.full((5, 256), torch.nan)
    inverse = inverse_permutation.masked_fill(absent, -1).to(torch.int32)
    ReferenceBackend().unpermute(rows.to(dtype), inverse, weights.masked_fill(absent, torch.inf), out)
    assert torch.equal(out, unpermute_rows(rows, inverse_permutation, weights, absent))


def test_a_backends_sum_of_no_rows_is_zero() -> None:
    out = torch.full((3, 128), torch.nan)
    nothing = torch.full((3, 2), -1, dtype=torch.int32)
    ReferenceBackend().unpermute(torch.empty(0, 128), nothing, torch.full((3, 2), torch.nan), out)
    assert torch.equal(out, torch.zeros(3, 128))
