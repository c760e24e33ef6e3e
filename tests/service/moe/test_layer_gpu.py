"""The layer on the Hopper backend against the float64 reference, without host synchronization."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from expertd.kernels import resolve_backend
from expertd.service.device import device_of
from expertd.service.memory import host_view
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import LayerRequest
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights
from tests.kernels.helpers import diff, forbid_host_sync, fresh_generator
from tests.service.moe.reference_layer import assert_close, reference_layer

pytestmark = pytest.mark.gpu

SHAPE = LayerShape(hidden_size=1024, intermediate_size=384, num_experts=24, top_k=4)
LAYOUTS = {"contiguous": 0, "masked": 1000}


def _layer(layout: str) -> MoELayer:
    weights = random_weights(SHAPE, fresh_generator().initial_seed(), "cuda")
    return MoELayer(SHAPE, weights, resolve_backend("hopper"), masked_max_tokens=LAYOUTS[layout])


@pytest.mark.parametrize("num_tokens", [1, 7, 65])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layer_matches_the_reference_and_never_waits(layout: str, num_tokens: int) -> None:
    layer = _layer(layout)
    size = (num_tokens, SHAPE.hidden_size)
    hidden_states = torch.randn(size, device="cuda", generator=fresh_generator("cuda")).to(torch.bfloat16)
    layer(hidden_states)
    with forbid_host_sync():
        out = layer(hidden_states)
    assert_close(out, reference_layer(hidden_states, layer.weights, SHAPE.top_k))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nan_stays_in_its_own_row(layout: str) -> None:
    layer = _layer(layout)
    hidden_states = torch.randn(20, SHAPE.hidden_size, device="cuda", generator=fresh_generator("cuda"))
    clean = layer(hidden_states)
    hidden_states[7, 100] = torch.nan
    out = layer(hidden_states)
    others = torch.arange(20, device="cuda") != 7
    assert out[7].isnan().all()
    assert diff(out[others], clean[others]) < 1e-4


@pytest.mark.parametrize(
    ("dtype", "exact"), [(torch.bfloat16, False), (torch.float32, True), (torch.float32, False)]
)
def test_logits_are_float32_sums_of_exact_products(dtype: torch.dtype, exact: bool) -> None:
    """Rounding states, router or sums to bf16 would cost 1.6e-3."""
    weights = random_weights(SHAPE, fresh_generator().initial_seed(), "cuda")
    generator = fresh_generator("cuda")
    router = (
        weights.router if exact else torch.randn(weights.router.shape, device="cuda", generator=generator)
    )
    logits: list[Tensor] = []

    class Listening(type(resolve_backend("hopper"))):  # type: ignore[misc]
        def choose_experts(self, *arguments: Any) -> tuple[Tensor, Tensor]:
            logits.append(arguments[0])
            chosen: tuple[Tensor, Tensor] = super().choose_experts(*arguments)
            return chosen

    hidden_states = torch.randn(65, SHAPE.hidden_size, device="cuda", generator=generator).to(dtype)
    MoELayer(SHAPE, replace(weights, router=router), Listening()).route(hidden_states)
    expected = hidden_states.double() @ router.double().t()
    assert logits[0].dtype == torch.float32
    assert (logits[0] - expected).norm() < 1e-4 * expected.norm()


def test_routing_is_batch_invariant() -> None:
    layer = _layer("contiguous")
    generator = fresh_generator("cuda")
    hidden_states = torch.randn(500, SHAPE.hidden_size, device="cuda", generator=generator).bfloat16()
    ids, weights = layer.route(hidden_states)
    for part in (slice(0, 1), slice(64, 70), slice(3, 300), slice(499, 500)):
        some_ids, some_weights = layer.route(hidden_states[part])
        assert torch.equal(some_ids, ids[part])
        assert torch.equal(some_weights, weights[part])


def test_the_runner_copies_bytes_to_the_device_and_back() -> None:
    runner = LayerRunner(_layer("masked"), device_of("cuda"))
    hidden_states = torch.randn(5, SHAPE.hidden_size, generator=fresh_generator()).to(torch.bfloat16)
    data = hidden_states.view(torch.uint8).numpy().tobytes()
    request = LayerRequest(5, data, "BF16", None, "INT32", None, "FP32")
    result = runner.run([request, request])
    assert sum(result.tokens_per_expert) == 2 * 5 * SHAPE.top_k
    expected = reference_layer(hidden_states.cuda(), runner.layer.weights, SHAPE.top_k).cpu()
    for output in result.outputs:
        rows = torch.frombuffer(bytearray(host_view(output)), dtype=torch.float32).view(hidden_states.shape)
        assert_close(rows, expected)
