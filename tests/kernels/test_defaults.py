"""No function takes dtypes or devices from defaults of torch, or has gradients, whatever it is given."""

import ast
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

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
from tests.paths import ROOT

T, H, G, TOP_K = 6, 256, 2, 2
IDS = torch.tensor([[0, 1]], dtype=torch.int32).repeat(T, 1)
OFFSETS = torch.tensor([0, 4, T], dtype=torch.int32)
COUNTS = torch.full((G,), T // G, dtype=torch.int32)
ALLOCATING = {f"torch.{name}" for name in ("empty", "zeros", "ones", "full", "tensor", "rand", "randn")}
GROUPED = Routing("sigmoid", num_expert_groups=2, topk_group=1)


class InSteps(ReferenceBackend):
    """The default steps, on the reference's GEMMs."""

    ffn = Backend.ffn


def _weights(weights: Tensor, matrix: Tensor) -> Quantized:
    return quantize_blocks(matrix)._replace(scales=weights.flatten()[: G * 4].view(G, 2, 2))


def _masked(x: Tensor, weights: Tensor, matrix: Tensor) -> Tensor:
    a = Quantized(*(part.contiguous().view(G, T // G, -1) for part in quantize_rows(x)))
    return grouped_gemm_masked(a, _weights(weights, matrix), COUNTS, backend="reference")


def _experts(backend: Backend, is_quantized: bool = False) -> Callable[..., Tensor]:
    def run(x: Tensor, weights: Tensor, matrix: Tensor) -> Tensor:
        gate_up, down = quantize_blocks(matrix), quantize_blocks(matrix[..., :128])
        down = down._replace(scales=weights.flatten()[: G * 2].view(G, 2, 1))
        rows = quantize_rows(x) if is_quantized else x
        return fused_experts(rows, IDS, weights, gate_up, down, backend=backend)

    return run


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor | Sequence[Tensor]]] = {
    "fused_experts": _experts(ReferenceBackend()),
    "fused_experts in steps": _experts(InSteps()),
    "fused_experts of quantized rows": _experts(ReferenceBackend(), is_quantized=True),
    "grouped_gemm_contiguous": lambda x, weights, matrix: grouped_gemm_contiguous(
        quantize_rows(x), _weights(weights, matrix), OFFSETS, backend="reference"
    ),
    "grouped_gemm_masked": _masked,
    "choose_experts": lambda x, weights, matrix: choose_experts(x, matrix[0, 0], 3, GROUPED),
    "choose_experts by sparsemixer": lambda x, weights, matrix: choose_experts(
        x, None, 2, Routing("sparsemixer")
    ),
    "route": lambda x, weights, matrix: ReferenceBackend().route(x, matrix[0], matrix[0, 0], 3, Routing()),
    "unpermute_rows": lambda x, weights, matrix: unpermute_rows(x, IDS, weights),
    "swiglu": lambda x, weights, matrix: swiglu(x),
    "permute_rows": lambda x, weights, matrix: (
        permute_rows(quantize_rows(x)._replace(scales=weights), IDS[:, 0]).scales
    ),
    "quantize_rows": lambda x, weights, matrix: quantize_rows(x),
    "quantize_blocks": lambda x, weights, matrix: quantize_blocks(matrix),
    "dequantize_rows": lambda x, weights, matrix: dequantize_rows(quantize_rows(x).data, weights),
    "expand_rows": lambda x, weights, matrix: expand_rows(quantize_rows(x).data, weights.abs() + 1),
    "dequantize_blocks": lambda x, weights, matrix: dequantize_blocks(
        quantize_blocks(matrix[0]).data, weights[:2]
    ),
}


def _results(name: str, given: Sequence[Tensor]) -> list[Tensor]:
    result = CALLS[name](*given)
    parts = [result] if isinstance(result, Tensor) else list(result)
    assert not any(part.requires_grad or part.grad_fn for part in parts)
    return [part.view(torch.uint8) if part.itemsize == 1 else part for part in parts]


@pytest.fixture
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("name", CALLS)
def test_results_depend_on_neither_defaults_nor_gradients(name: str) -> None:
    generator = fresh_generator()
    given = [torch.randn(size, generator=generator) for size in ((T, H), (T, TOP_K), (G, H, H))]
    expected = _results(name, given)
    results = [_results(name, [tensor.clone().requires_grad_() for tensor in given])]
    assert torch.is_grad_enabled()
    with torch.device("meta"):
        results.append(_results(name, given))
    for dtype in (torch.bfloat16, torch.float64):
        torch.set_default_dtype(dtype)
        results.append(_results(name, given))
    for each in results:
        assert [part.dtype for part in each] == [part.dtype for part in expected]
        assert all(torch.equal(*pair) for pair in zip(each, expected, strict=True))


def test_out_may_require_gradients() -> None:
    weights = torch.randn(T, TOP_K, generator=fresh_generator()).requires_grad_()
    gate_up, down = quantize_blocks(torch.ones(G, 256, H)), quantize_blocks(torch.ones(G, H, 128))
    out = torch.zeros(T, H, requires_grad=True)
    result = fused_experts(torch.ones(T, H), IDS, weights, gate_up, down, out=out, backend="reference")
    assert result is out
    assert out.grad_fn is None
    assert out.any()


def _allocations(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ALLOCATING:
            yield node


def test_every_allocation_names_its_dtype_and_device() -> None:
    """Kernels write fp32 and int32."""
    found = [(path, call) for path in (ROOT / "kernels").rglob("*.py") for call in _allocations(path)]
    assert len(found) > 10
    for path, call in found:
        missing = {"dtype", "device"} - {keyword.arg for keyword in call.keywords}
        assert not missing, f"{path}:{call.lineno}: {ast.unparse(call)} lacks {missing}"
