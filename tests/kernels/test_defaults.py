"""Kernels write fp32 and int32, so no tensor may take its dtype or device from torch's defaults."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from expertd.kernels import (
    Backend,
    Routing,
    choose_experts,
    fused_experts,
    quantize_blocks,
    quantize_rows,
    swiglu,
    unpermute_rows,
)
from expertd.kernels.backends.reference.backend import ReferenceBackend
from tests.kernels.helpers import fresh_generator
from tests.paths import ROOT

T, H, I, G, TOP_K = 20, 256, 128, 4, 2  # noqa: E741
ALLOCATING = {f"torch.{name}" for name in ("empty", "zeros", "ones", "full", "tensor", "rand", "randn")}


class InSteps(ReferenceBackend):
    """The default steps, on the reference's GEMMs."""

    ffn = Backend.ffn


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def other_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    yield request.param
    torch.set_default_dtype(before)


def _allocations(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ALLOCATING:
            yield node


def test_every_allocation_names_its_dtype_and_device() -> None:
    found = [(path, call) for path in (ROOT / "kernels").rglob("*.py") for call in _allocations(path)]
    assert len(found) > 10
    for path, call in found:
        missing = {"dtype", "device"} - {keyword.arg for keyword in call.keywords}
        assert not missing, f"{path}:{call.lineno}: {ast.unparse(call)} lacks {missing}"


def _results(backend: Backend) -> list[Tensor]:
    """One of each public function that allocates, always from the same fp32 numbers."""
    generator = fresh_generator(seed=3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float32, device="cpu", generator=generator)

    hidden_states, logits, rows = normal(T, H), normal(T, G), normal(T * TOP_K, H)
    gate_up, down = quantize_blocks(normal(G, 2 * I, H)), quantize_blocks(normal(G, H, I))
    routing = Routing("sigmoid", num_expert_groups=2, topk_group=1)
    ids, weights = choose_experts(logits, None, TOP_K, routing)
    sparse = choose_experts(logits, None, TOP_K, Routing("sparsemixer"))
    routed = backend.route(hidden_states, normal(G, H), normal(G), TOP_K, Routing())
    inverse = torch.arange(T * TOP_K, dtype=torch.int64, device="cpu").view(T, TOP_K)
    out = fused_experts(hidden_states, ids, weights, gate_up, down, backend=backend)
    quantized = quantize_rows(hidden_states)
    of_quantized = fused_experts(quantized, ids, weights, gate_up, down, backend=backend)
    unpermuted = unpermute_rows(rows, inverse, weights)
    parts = ids, weights, *sparse, *routed, out, of_quantized, *quantized, unpermuted, swiglu(rows)
    return [part.view(torch.uint8) if part.itemsize == 1 else part for part in parts]


@pytest.mark.parametrize("make", [ReferenceBackend, InSteps])
def test_another_default_dtype_changes_nothing(make: type[Backend], other_dtype: torch.dtype) -> None:
    expected = _results(make())
    torch.set_default_dtype(other_dtype)
    results = _results(make())
    assert [part.dtype for part in results] == [part.dtype for part in expected]
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.parametrize("make", [ReferenceBackend, InSteps])
def test_another_default_device_changes_nothing(make: type[Backend]) -> None:
    expected = _results(make())
    with torch.device("meta"):
        results = _results(make())
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
