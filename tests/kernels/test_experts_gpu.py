"""The layer's own kernels on Hopper, each against PyTorch, and all together against float64."""

from typing import Any

import pytest
import torch

from kernels import (
    Backend,
    Routing,
    Swiglu,
    choose_experts,
    fused_experts,
    quantize_blocks,
    quantize_rows,
    resolve_backend,
    sort_by_group,
)
from kernels.backends.hopper_kernels import current_stream
from tests.kernels.helpers import diff, forbid_host_sync, fresh_generator

pytestmark = pytest.mark.gpu


def _stream() -> tuple[Any, Any]:
    backend: Any = resolve_backend("hopper")
    return backend, current_stream(0)


@pytest.mark.parametrize("num_groups", [1, 8, 256, 1024])
@pytest.mark.parametrize("shape", [(1, 1), (1, 8), (3, 5), (64, 9), (1000, 8), (4096, 9)])
def test_sort(shape: tuple[int, int], num_groups: int) -> None:
    backend, stream = _stream()
    group_ids = torch.randint(
        0, num_groups + 1, shape, generator=fresh_generator("cuda"), device="cuda", dtype=torch.int32
    )
    rows, offsets = backend._layer.sort(stream, group_ids, num_groups, None)
    order = sort_by_group(group_ids, num_groups)
    assert torch.equal(offsets, order.offsets)
    there = group_ids < num_groups
    assert torch.equal(rows[there].long(), order.rows[there])
    assert (rows[~there] == -1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [128, 1024, 7168])
def test_quantize(k: int, dtype: torch.dtype) -> None:
    backend, stream = _stream()
    x = torch.randn(37, k, generator=fresh_generator("cuda"), device="cuda").mul_(10).to(dtype)
    x[3, 5], x[4] = torch.nan, 0
    rows = (
        torch.randperm(37 * 3, generator=fresh_generator("cuda"), device="cuda").to(torch.int32).view(37, 3)
    )
    out, expected = backend._layer.quantize(stream, x, rows), quantize_rows(x)
    for slot in range(3):
        index = rows[:, slot].long()
        assert torch.equal(out.data.view(torch.uint8)[index], expected.data.view(torch.uint8))
        assert torch.equal(
            out.scales[index].view(torch.int32), expected.scales.contiguous().view(torch.int32)
        )


@pytest.mark.parametrize(
    "routing",
    [
        Routing(),
        Routing(renormalize=False),
        Routing("sigmoid", scale=2.5),
        Routing("sigmoid", True, 2.5, 8, 4),
    ],
)
@pytest.mark.parametrize("num_experts", [8, 160, 256, 384, 1024])
def test_route(num_experts: int, routing: Routing) -> None:
    backend = resolve_backend("hopper")
    generator = fresh_generator("cuda")
    logits = torch.randn(777, num_experts, generator=generator, device="cuda").round(decimals=2)  # with ties
    bias = (
        torch.randn(num_experts, generator=generator, device="cuda") if routing.scoring == "sigmoid" else None
    )
    top_k = min(8, num_experts // 2)
    ids, weights = backend.choose_experts(logits, bias, top_k, routing)
    expected_ids, expected_weights = choose_experts(logits, bias, top_k, routing)
    same = (ids == expected_ids).all(1)
    assert same.float().mean() > 0.99  # expf and torch's exp differ in the last bit, which can part a tie
    torch.testing.assert_close(weights[same], expected_weights[same], rtol=1e-5, atol=0)


@pytest.mark.parametrize("tokens", [1, 5, 64, 300, 2000])
@pytest.mark.parametrize("sizes", [(1024, 384, 24, 4), (2048, 768, 128, 8), (7168, 2048, 16, 8)])
def test_experts(sizes: tuple[int, int, int, int], tokens: int) -> None:
    h, i, e, k = sizes
    backend = resolve_backend("hopper")
    generator = fresh_generator("cuda")
    gate_up = quantize_blocks(torch.randn(e, 2 * i, h, generator=generator, device="cuda").mul_(h**-0.5))
    down = quantize_blocks(torch.randn(e, h, i, generator=generator, device="cuda").mul_(i**-0.5))
    x = torch.randn(tokens, h, generator=generator, device="cuda").to(torch.bfloat16)
    ids = torch.rand(tokens, e, generator=generator, device="cuda").argsort(1)[:, :k].to(torch.int32)
    weights = torch.rand(tokens, k, generator=generator, device="cuda")
    arguments = (x, ids, weights, gate_up, down)
    out = fused_experts(*arguments)
    with forbid_host_sync():
        again = fused_experts(*arguments)
    assert torch.equal(out, again)
    for dtype in (torch.bfloat16, torch.float16):
        rounded = torch.full((tokens, h), torch.nan, dtype=dtype, device="cuda")
        assert fused_experts(*arguments, out=rounded) is rounded
        assert torch.equal(rounded, out.to(dtype))
    order = sort_by_group(ids, e)
    rows = backend.ffn(x, order.tokens, gate_up, down, order.offsets, Swiglu(), None)
    expected = (rows[order.rows].double() * weights[:, :, None]).sum(1)
    assert diff(out, expected) < (2e-4 if tokens * k > 64 else 2e-3)


def test_experts_that_are_not_here_add_nothing() -> None:
    """Nor do they cost rows; hidden states may lie anywhere."""
    h, i, e, k, tokens = 512, 256, 8, 3, 100
    generator = fresh_generator("cuda")
    gate_up = quantize_blocks(torch.randn(e, 2 * i, h, generator=generator, device="cuda").mul_(h**-0.5))
    down = quantize_blocks(torch.randn(e, h, i, generator=generator, device="cuda").mul_(i**-0.5))
    memory = torch.randn(tokens * h + 1, generator=generator, device="cuda").to(torch.bfloat16)
    x = memory[1:].view(tokens, h)  # two bytes past an aligned address
    ids = torch.randint(-2, e + 3, (tokens, k), generator=generator, device="cuda", dtype=torch.int32)
    weights = torch.rand(tokens, k, generator=generator, device="cuda")
    absent = (ids < 0) | (ids >= e)
    weights[absent] = torch.nan
    out = fused_experts(x, ids, weights, gate_up, down)
    some = fused_experts(x, ids.masked_fill(absent, 0), weights.masked_fill(absent, 0), gate_up, down)
    assert diff(out, some.double()) < 1e-6
    assert (out[absent.all(1)] == 0).all()
    assert torch.equal(fused_experts(x.t().contiguous().t(), ids, weights, gate_up, down), out)


@pytest.mark.parametrize("tokens", [3, 200])
def test_other_activations(tokens: int) -> None:
    """Gates and ups beyond the limit are many here; the composition of single steps is the yardstick."""
    h, i, e, k = 512, 256, 4, 2
    backend, activation = resolve_backend("hopper"), Swiglu(alpha=1.702, limit=1.5)
    generator = fresh_generator("cuda")
    gate_up = quantize_blocks(torch.randn(e, 2 * i, h, generator=generator, device="cuda").mul_(2 * h**-0.5))
    down = quantize_blocks(torch.randn(e, h, i, generator=generator, device="cuda").mul_(i**-0.5))
    x = torch.randn(tokens, h, generator=generator, device="cuda").to(torch.bfloat16)
    ids = torch.rand(tokens, e, generator=generator, device="cuda").argsort(1)[:, :k].to(torch.int32)
    weights = torch.rand(tokens, k, generator=generator, device="cuda")
    out = fused_experts(x, ids, weights, gate_up, down, activation=activation)
    expected = torch.empty_like(out)
    Backend.experts(backend, x, ids, weights, gate_up, down, expected, activation, None)
    assert diff(out, expected.double()) < 1e-3
    assert diff(out, fused_experts(x, ids, weights, gate_up, down).double()) > 1e-2


@pytest.mark.parametrize("num_sms", [1, 2, 3, 20])
def test_any_sm_count(num_sms: int) -> None:
    h, i, e, k, tokens = 512, 256, 8, 2, 50
    generator = fresh_generator("cuda")
    gate_up = quantize_blocks(torch.randn(e, 2 * i, h, generator=generator, device="cuda").mul_(h**-0.5))
    down = quantize_blocks(torch.randn(e, h, i, generator=generator, device="cuda").mul_(i**-0.5))
    x = torch.randn(tokens, h, generator=generator, device="cuda").to(torch.bfloat16)
    ids = torch.rand(tokens, e, generator=generator, device="cuda").argsort(1)[:, :k].to(torch.int32)
    weights = torch.rand(tokens, k, generator=generator, device="cuda")
    everywhere = fused_experts(x, ids, weights, gate_up, down)
    out = fused_experts(x, ids, weights, gate_up, down, num_sms=num_sms)
    if num_sms == 1:
        assert diff(out, everywhere.double()) < 2e-3
    else:
        assert torch.equal(out, everywhere)


def test_ten_runs_and_other_company_give_the_same_bits() -> None:
    """A token's output depends on nothing but the token, its routing and the weights."""
    h, i, e, k, tokens = 1024, 512, 16, 4, 700
    generator = fresh_generator("cuda")
    gate_up = quantize_blocks(torch.randn(e, 2 * i, h, generator=generator, device="cuda").mul_(h**-0.5))
    down = quantize_blocks(torch.randn(e, h, i, generator=generator, device="cuda").mul_(i**-0.5))
    x = torch.randn(tokens, h, generator=generator, device="cuda").to(torch.bfloat16)
    ids = torch.rand(tokens, e, generator=generator, device="cuda").argsort(1)[:, :k].to(torch.int32)
    weights = torch.rand(tokens, k, generator=generator, device="cuda")
    out = fused_experts(x, ids, weights, gate_up, down)
    for _ in range(10):
        again = torch.full_like(out, torch.nan)
        fused_experts(x, ids, weights, gate_up, down, out=again)
        assert torch.equal(again, out)
    for part in (slice(0, 1), slice(13, 20), slice(100, 400), slice(699, 700)):
        alone = fused_experts(x[part], ids[part].clone(), weights[part].clone(), gate_up, down)
        assert torch.equal(alone, out[part])
