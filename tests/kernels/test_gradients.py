"""No function has gradients, whatever its arguments require, and results are the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd.kernels import (
    Backend,
    Quantized,
    Routing,
    choose_experts,
    dequantize_blocks,
    dequantize_rows,
    expand_rows,
    fused_experts,
    grouped_gemm_contiguous,
    grouped_gemm_masked,
    permute_rows,
    quantize_blocks,
    quantize_rows,
    swiglu,
    unpermute_rows,
)
from expertd.kernels.backends.reference.backend import ReferenceBackend
from tests.kernels.helpers import fresh_generator

T, H, G, TOP_K = 6, 256, 2, 2
IDS = torch.tensor([[0, 1]], dtype=torch.int32).repeat(T, 1)
OFFSETS = torch.tensor([0, 4, T], dtype=torch.int32)


class InSteps(ReferenceBackend):
    """The default steps, on the reference's GEMMs."""

    ffn = Backend.ffn


def _contiguous(x: Tensor, weights: Tensor, matrix: Tensor) -> Tensor:
    b = quantize_blocks(matrix)._replace(scales=weights.flatten()[: G * 4].view(G, 2, 2))
    return grouped_gemm_contiguous(quantize_rows(x), b, OFFSETS, backend="reference")


def _masked(x: Tensor, weights: Tensor, matrix: Tensor) -> Tensor:
    b = quantize_blocks(matrix)._replace(scales=weights.flatten()[: G * 4].view(G, 2, 2))
    a = Quantized(*(part.contiguous().view(G, T // G, -1) for part in quantize_rows(x)))
    counts = torch.full((G,), T // G, dtype=torch.int32)
    return grouped_gemm_masked(a, b, counts, backend="reference")


def _experts(backend: Backend) -> Callable[..., Tensor]:
    def run(x: Tensor, weights: Tensor, matrix: Tensor) -> Tensor:
        gate_up, down = quantize_blocks(matrix), quantize_blocks(matrix[..., :128])
        down = down._replace(scales=weights.flatten()[: G * 2].view(G, 2, 1))
        return fused_experts(x, IDS, weights, gate_up, down, backend=backend)

    return run


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "fused_experts": _experts(ReferenceBackend()),
    "fused_experts in steps": _experts(InSteps()),
    "grouped_gemm_contiguous": _contiguous,
    "grouped_gemm_masked": _masked,
    "choose_experts": lambda x, weights, matrix: choose_experts(x, matrix[0, 0], 3, Routing())[1],
    "route": lambda x, weights, matrix: ReferenceBackend().route(x, matrix[0], matrix[0, 0], 3, Routing())[1],
    "unpermute_rows": lambda x, weights, matrix: unpermute_rows(x, IDS, weights),
    "swiglu": lambda x, weights, matrix: swiglu(x),
    "permute_rows": lambda x, weights, matrix: (
        permute_rows(quantize_rows(x)._replace(scales=weights), IDS[:, 0]).scales
    ),
    "dequantize_rows": lambda x, weights, matrix: dequantize_rows(quantize_rows(x).data, weights),
    "expand_rows": lambda x, weights, matrix: expand_rows(quantize_rows(x).data, weights.abs() + 1),
    "dequantize_blocks": lambda x, weights, matrix: dequantize_blocks(
        quantize_blocks(matrix[0]).data, weights[:2]
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_requires_gradients_gives_none(name: str) -> None:
    generator = fresh_generator()
    given = [torch.randn(size, generator=generator) for size in ((T, H), (T, TOP_K), (G, H, H))]
    expected = CALLS[name](*given)
    result = CALLS[name](*(tensor.clone().requires_grad_() for tensor in given))
    assert not result.requires_grad
    assert result.grad_fn is None
    assert torch.equal(result, expected)
    assert torch.is_grad_enabled()


def test_out_may_require_gradients() -> None:
    weights = torch.randn(T, TOP_K, generator=fresh_generator()).requires_grad_()
    gate_up, down = quantize_blocks(torch.ones(G, 256, H)), quantize_blocks(torch.ones(G, H, 128))
    out = torch.zeros(T, H, requires_grad=True)
    result = fused_experts(torch.ones(T, H), IDS, weights, gate_up, down, out=out, backend="reference")
    assert result is out
    assert out.grad_fn is None
    assert out.any()
