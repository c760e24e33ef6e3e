"""The weighted sum of a token's rows."""

import pytest
import torch
from torch import Tensor

from expertd.kernels import unpermute_rows
from expertd.kernels.backends.reference.backend import ReferenceBackend
from tests.kernels.helpers import fresh_generator


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
