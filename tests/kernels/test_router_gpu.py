"""The router's kernels on Hopper against PyTorch: logits, and the choice of experts."""

from functools import reduce

import pytest
import torch
from torch import Tensor

from expertd.kernels import Routing, choose_experts, resolve_backend
from expertd.kernels.backends.hopper.launch import Kernels
from expertd.kernels.backends.hopper.router_logits import router_logits
from expertd.kernels.backends.hopper.tensor_maps import TensorMapCache, describe_rows
from expertd.kernels.backends.streams import current_stream
from tests.kernels.helpers import fresh_generator
from tests.kernels.reference_routing import ODD_SIZES, ROUTINGS

pytestmark = pytest.mark.gpu


def _logits(x: Tensor, router: Tensor) -> Tensor:
    """fp32 [T, E]: the partial sums, added up in the kernel's order."""
    logits = router_logits(Kernels(), current_stream(0), TensorMapCache(describe_rows), x, router)
    total = torch.zeros_like(logits.data[0])
    for first in range(0, len(logits.data), logits.sums):
        total += reduce(torch.add, logits.data[first : first + logits.sums])
    return total


@pytest.mark.parametrize(
    "routing",
    ROUTINGS,
)
@pytest.mark.parametrize("num_experts", [8, 160, 256, 384, 1024])
def test_route(num_experts: int, routing: Routing) -> None:
    backend = resolve_backend("hopper")
    generator = fresh_generator("cuda")
    logits = torch.randn(777, num_experts, generator=generator, device="cuda").round(decimals=2)  # with ties
    bias = (
        torch.randn(num_experts, generator=generator, device="cuda")
        if routing.scoring_func == "sigmoid" or routing.bias_on == "logits"
        else None
    )
    top_k = min(8, num_experts // 2)
    ids, weights = backend.choose_experts(logits, bias, top_k, routing)
    expected_ids, expected_weights = choose_experts(logits, bias, top_k, routing)
    same = (ids == expected_ids).all(1)
    assert same.float().mean() > 0.99  # expf and torch's exp differ in the last bit, which can break a tie
    torch.testing.assert_close(weights[same], expected_weights[same], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "routing"),
    ODD_SIZES,
)
@pytest.mark.parametrize("tokens", [1, 300])
def test_route_of_odd_sizes(num_experts: int, top_k: int, routing: Routing, tokens: int) -> None:
    """Unaligned logits: far apart, so that all choices must agree, then all equal, so that the lowest win."""
    backend, generator = resolve_backend("hopper"), fresh_generator("cuda")
    order = torch.rand(tokens, num_experts, generator=generator, device="cuda").argsort(1)
    logits = torch.empty(tokens * num_experts + 1, device="cuda")[1:].view(tokens, num_experts)
    logits.copy_(order.float().mul_(6 / num_experts))
    for values in (logits, torch.zeros_like(logits)):
        ids, weights = backend.choose_experts(values, None, top_k, routing)
        expected_ids, expected_weights = choose_experts(values, None, top_k, routing)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=0)


def test_a_token_with_nan_or_infinity_affects_no_other() -> None:
    backend, generator = resolve_backend("hopper"), fresh_generator("cuda")
    logits = torch.randn(20, 256, generator=generator, device="cuda")
    logits[3], logits[4, 7], logits[5, 9], logits[6] = torch.nan, torch.nan, torch.inf, -torch.inf
    for routing in (Routing(), Routing("sigmoid", True, 2.5, 8, 4)):
        ids, weights = backend.choose_experts(logits, None, 8, routing)
        expected_ids, expected_weights = choose_experts(logits, None, 8, routing)
        others = torch.arange(20, device="cuda") > 6
        assert torch.equal(ids[others], expected_ids[others])
        torch.testing.assert_close(weights[others], expected_weights[others], rtol=1e-5, atol=0)
        assert ((ids >= 0) & (ids < 256)).all()
        assert torch.equal(weights.isnan().any(1), expected_weights.isnan().any(1))
        assert (ids.sort(1).values.diff(dim=1) > 0).all(), "no expert comes twice"


@pytest.mark.parametrize("tokens", [1, 63, 64, 200, 1000])
@pytest.mark.parametrize(
    ("num_experts", "k"), [(1, 256), (8, 4096), (33, 1408), (60, 128), (128, 2048), (256, 7168), (1000, 1152)]
)
def test_logits(num_experts: int, k: int, tokens: int) -> None:
    """Added up, the parts are fp32 sums of exact products, and a token's do not depend on other tokens."""
    generator = fresh_generator("cuda")
    x, router = (
        torch.randn(n, k, generator=generator, device="cuda").to(torch.bfloat16)
        for n in (tokens, num_experts)
    )
    x[tokens // 2, 5] = torch.nan
    logits = _logits(x, router)
    expected = x.double() @ router.double().t()
    others = torch.arange(tokens, device="cuda") != tokens // 2
    assert logits[tokens // 2].isnan().all()
    assert (logits - expected)[others].norm() <= 1e-6 * expected[others].norm()
    for part in (slice(0, 1), slice(tokens // 3, tokens // 3 + 70)):
        some = _logits(x[part].contiguous(), router)
        assert torch.equal(some.nan_to_num(7), logits[part].nan_to_num(7))


@pytest.mark.parametrize("routing", [Routing("sigmoid", True, 2.5, 8, 4), Routing(bias_on="logits")])
@pytest.mark.parametrize("tokens", [1, 17, 256, 1000])
def test_route_equals_logits_then_choice(tokens: int, routing: Routing) -> None:
    """With the dry run (up to two tokens for each SM) and without, replayed many times."""
    backend = resolve_backend("hopper")
    generator = fresh_generator("cuda")
    x, router = (torch.randn(n, 7168, generator=generator, device="cuda").bfloat16() for n in (tokens, 256))
    bias = torch.rand(256, generator=generator, device="cuda")
    router *= 7168**-0.5
    logits = _logits(x, router)
    expected_ids, expected_weights = choose_experts(logits, bias, 8, routing)
    backend.route(x, router, bias, 8, routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            ids, weights = backend.route(x, router, bias, 8, routing)
    for _ in range(5):
        ids.fill_(-7)
        weights.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=0)
        assert torch.equal(ids, expected_ids)


@pytest.mark.parametrize("num_experts", [48, 64])
@pytest.mark.parametrize("top_k", [4, 33])
@pytest.mark.parametrize("router_dtype", [torch.bfloat16, torch.float32])
def test_padding_has_no_experts(router_dtype: torch.dtype, top_k: int, num_experts: int) -> None:
    """Whichever way logits and choices take: kernels, cuBLAS, or torch for more slots than lanes."""
    generator, backend = fresh_generator("cuda"), resolve_backend("hopper")
    tokens = torch.randn(40, 256, generator=generator, device="cuda").to(router_dtype)
    router = torch.randn(num_experts, 256, generator=generator, device="cuda").to(router_dtype)
    end = torch.tensor([17], dtype=torch.int32).pin_memory()
    ids, weights = backend.route(tokens, router, None, top_k, Routing(), end)
    expected_ids, expected_weights = backend.route(tokens, router, None, top_k, Routing())
    assert torch.equal(ids[:17], expected_ids[:17])
    assert (ids[17:] == -1).all()
    assert torch.equal(weights[:17], expected_weights[:17])
