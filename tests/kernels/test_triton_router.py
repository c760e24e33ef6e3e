"""The router's kernels in Triton against PyTorch: on a GPU, or interpreted where there is none."""

from typing import Any

import numpy as np
import pytest
import torch

from expertd.kernels import Routing, choose_experts
from expertd.kernels.backends.triton.targets import TARGETS
from expertd.kernels.backends.triton.variants import ROUTER_COLUMNS
from tests.kernels.helpers import fresh_generator
from tests.kernels.reference_routing import ODD_SIZES, ROUTINGS
from tests.kernels.triton_on_any_device import DEVICE, KINDS, ON_GPU, OnAnyDevice
from tests.short import few_of

pytest.importorskip("triton", reason="needs Triton")

TOKENS = 300 if ON_GPU else 6  # each is a program, which the interpreter takes its time for
pytestmark = [pytest.mark.slow, *([pytest.mark.gpu] if ON_GPU else [])]


@pytest.fixture
def backend() -> OnAnyDevice:
    """The kernels are the same for every target."""
    return OnAnyDevice(TARGETS[KINDS[-1]])


@pytest.fixture
def products_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the interpreter, which multiplies the bits of bf16 as if they were integers."""
    if ON_GPU:
        return
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    theirs = InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        assert handle.dtype.scalar == bfloat16
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return theirs(self, widened(a), widened(b), *others)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.parametrize(
    "routing",
    ROUTINGS,
    ids=str,
)
@pytest.mark.parametrize("num_experts", few_of([8, 160, 384], (160,)))  # ODD_SIZES has others
def test_experts_are_chosen_as_by_pytorch(num_experts: int, routing: Routing, backend: OnAnyDevice) -> None:
    generator = fresh_generator(DEVICE)
    logits = torch.randn(TOKENS, num_experts, generator=generator, device=DEVICE).round(
        decimals=2
    )  # with ties
    bias = None
    if routing.scoring_func == "sigmoid" or routing.bias_on == "logits":
        bias = torch.randn(num_experts, generator=generator, device=DEVICE)
    top_k = min(8, num_experts // 2)
    ids, weights = backend.choose_experts(logits, bias, top_k, routing)
    expected_ids, expected_weights = choose_experts(logits, bias, top_k, routing)
    same = (ids == expected_ids).all(1)
    assert same.sum() >= 0.99 * TOKENS - 1  # exponentials differ in the last bit, which can break a tie
    torch.testing.assert_close(weights[same], expected_weights[same], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "routing"),
    ODD_SIZES,
    ids=str,
)
def test_odd_sizes_and_ties(num_experts: int, top_k: int, routing: Routing, backend: OnAnyDevice) -> None:
    """Logits far apart, so that all choices must agree, then all equal, so that the lowest win."""
    order = torch.rand(3, num_experts, generator=fresh_generator(DEVICE), device=DEVICE).argsort(1)
    logits = order * (6 / num_experts)
    for values in (logits, torch.zeros_like(logits)):
        ids, weights = backend.choose_experts(values, None, top_k, routing)
        expected_ids, expected_weights = choose_experts(values, None, top_k, routing)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's
def test_a_token_with_nan_or_infinity_affects_no_other(backend: OnAnyDevice) -> None:
    logits = torch.randn(9, 256, generator=fresh_generator(DEVICE), device=DEVICE)
    logits[3], logits[4, 7], logits[5, 9], logits[6] = torch.nan, torch.nan, torch.inf, -torch.inf
    others = torch.tensor([0, 1, 2, 7, 8], device=DEVICE)
    for routing in (Routing(), Routing("sigmoid", True, 2.5, 8, 4)):
        ids, weights = backend.choose_experts(logits, None, 8, routing)
        expected_ids, expected_weights = choose_experts(logits, None, 8, routing)
        assert torch.equal(ids[others], expected_ids[others])
        torch.testing.assert_close(weights[others], expected_weights[others], rtol=1e-5, atol=0)
        assert ((ids >= 0) & (ids < 256)).all()
        assert torch.equal(weights.isnan().any(1), expected_weights.isnan().any(1))
        assert (ids.sort(1).values.diff(dim=1) > 0).all(), "no expert comes twice"


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize(
    ("tokens", "num_experts", "k"), [(1, 8, 128), (33, 65, 144), (5, 130, 2 * ROUTER_COLUMNS + 16)]
)
def test_logits_are_sums_of_exact_products(
    tokens: int, num_experts: int, k: int, backend: OnAnyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's do not depend on other tokens, NaN among them."""
    generator = fresh_generator(DEVICE)
    x, router = (
        torch.randn(n, k, generator=generator, device=DEVICE).to(torch.bfloat16)
        for n in (tokens, num_experts)
    )
    seen = []

    def keep(logits: torch.Tensor, *_: Any) -> Any:
        seen.append(logits.sum(0))

    monkeypatch.setattr(backend, "_route", keep)
    backend.route(x, router, None, 1, Routing())
    expected = x.double() @ router.double().t()
    assert (seen[0] - expected).norm() <= 1e-6 * expected.norm()
    x[0, 5] = torch.nan
    backend.route(x, router, None, 1, Routing())
    assert seen[1][0].isnan().all()
    assert torch.equal(seen[1][1:], seen[0][1:])
    if tokens > 1:
        backend.route(x[2:4], router, None, 1, Routing())
        assert torch.equal(seen[2], seen[0][2:4])


@pytest.mark.usefixtures("products_of_bf16")
@pytest.mark.parametrize("top_k", [4, 33])
@pytest.mark.parametrize("router_dtype", [torch.bfloat16, torch.float32])
def test_padding_has_no_experts(router_dtype: torch.dtype, top_k: int, backend: OnAnyDevice) -> None:
    """Whichever way logits and choices take: kernels, or PyTorch for more slots than a program has."""
    generator = fresh_generator(DEVICE)
    tokens = torch.randn(6, 256, generator=generator, device=DEVICE).to(router_dtype)
    router = torch.randn(48, 256, generator=generator, device=DEVICE).to(router_dtype) / 16
    end = torch.tensor([4], dtype=torch.int32)
    ids, weights = backend.route(tokens, router, None, top_k, Routing(), end.pin_memory() if ON_GPU else end)
    expected_ids, expected_weights = backend.route(tokens, router, None, top_k, Routing())
    assert torch.equal(ids[:4], expected_ids[:4])
    assert (ids[4:] == -1).all()
    assert torch.equal(weights[:4], expected_weights[:4])
    theirs = choose_experts(tokens.float() @ router.float().t(), None, top_k, Routing())
    assert torch.equal(expected_ids, theirs[0])
    torch.testing.assert_close(expected_weights, theirs[1], rtol=1e-4, atol=0)
