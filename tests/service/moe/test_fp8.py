"""FP8 hidden states: rows of e4m3 values and their scales."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from expertd.kernels import (
    Quantized,
    as_floats,
    expand_rows,
    fused_experts,
    quantize_rows,
    resolve_backend,
)
from expertd.service.device import device_of
from expertd.service.engine.chunks import part_of
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import FP8, LayerRequest, fp8_rows, row_bytes
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.step.batch import joined
from expertd.service.moe.step.batch import rows_of as rows_of_bytes
from expertd.service.moe.weights import random_weights
from tests.kernels.helpers import fresh_generator
from tests.service.moe.requests import Place, as_bytes, layer_request, on_gpu, pinned, rows_of

SHAPE = LayerShape(hidden_size=512, intermediate_size=256, num_experts=8, top_k=2)
H = SHAPE.hidden_size


@pytest.fixture(scope="module")
def runner() -> LayerRunner:
    return LayerRunner(
        MoELayer(SHAPE, random_weights(SHAPE, 3, "cpu"), resolve_backend("reference")), device_of("cpu")
    )


def tokens(count: int) -> Tensor:
    return torch.randn(count, H, generator=fresh_generator()).to(torch.bfloat16)


def routing(count: int) -> tuple[Tensor, Tensor]:
    generator = fresh_generator()
    ids = torch.rand(count, SHAPE.num_experts, generator=generator).argsort(1)[:, : SHAPE.top_k]
    return ids.int(), torch.rand(count, SHAPE.top_k, generator=generator)


def packed(quantized: Quantized) -> Tensor:
    """uint8 [T, row_bytes]."""
    data, scales = quantized.data.view(torch.uint8), quantized.scales.contiguous()
    rows = fp8_rows(data.numpy().data, scales.numpy().data, len(data))
    assert len(rows) == len(data) * row_bytes(FP8, H)
    return torch.from_numpy(np.frombuffer(rows, np.uint8).copy()).view(len(data), -1)


def fp8_request(values: Tensor, given: tuple[Tensor, Tensor] | None = None) -> LayerRequest:
    made = layer_request(values, "BF16", given)
    return replace(made, hidden_states=as_bytes(packed(quantize_rows(values))), datatype=FP8)


def outputs(runner: LayerRunner, requests: Sequence[LayerRequest]) -> list[Tensor]:
    return [rows_of(output, "FP32", H) for output in runner.run(requests).outputs]


@pytest.mark.parametrize("count", [1, 5, 100])
@pytest.mark.parametrize("is_routed", [True, False])
def test_the_result_is_that_of_the_values_in_fp32(runner: LayerRunner, count: int, is_routed: bool) -> None:
    values, given = tokens(count), None if is_routed else routing(count)
    expected = outputs(runner, [layer_request(expand_rows(*quantize_rows(values)), "FP32", given)])[0]
    assert torch.equal(outputs(runner, [fp8_request(values, given)])[0], expected)


def test_fp8_beside_other_requests(runner: LayerRunner) -> None:
    values, given = [tokens(count) for count in (3, 7, 2)], [routing(count) for count in (3, 7, 2)]
    requests = [
        fp8_request(values[0], given[0]),
        layer_request(values[1], "BF16", given[1]),
        fp8_request(values[2], given[2]),
    ]
    together = outputs(runner, requests)
    for request, output in zip(requests, together, strict=True):
        torch.testing.assert_close(outputs(runner, [request])[0], output, rtol=1e-2, atol=1e-2)


def test_a_chunk_has_its_rows_with_their_scales(runner: LayerRunner) -> None:
    values, given = tokens(12), routing(12)
    whole = fp8_request(values, given)
    scales = np.arange(12 * H // 128, dtype=np.float32)
    part = part_of(replace(whole, hidden_states=bytes(12 * H), scales=scales.tobytes()), 4, 4)
    assert part.scales == scales[4 * H // 128 : 8 * H // 128].tobytes()
    parts = [outputs(runner, [part_of(whole, start, 4)])[0] for start in (0, 4, 8)]
    torch.testing.assert_close(torch.cat(parts), outputs(runner, [whole])[0], rtol=1e-2, atol=1e-2)


def test_scales_may_lie_apart_from_their_values() -> None:
    made = quantize_rows(tokens(5))
    scales = made.scales.contiguous()
    beside = as_floats(rows_of_bytes(packed(made).flatten(), FP8, H))
    values, apart = (each.view(torch.uint8).flatten() for each in (made.data, scales))
    assert torch.equal(as_floats(rows_of_bytes(values, FP8, H, apart)), beside)
    assert torch.equal(beside, expand_rows(made.data, scales))


def test_floats_beside_fp8_are_quantized_and_fp8_keeps_its_bits() -> None:
    values, other = tokens(3), Quantized(*odd_scales(2))
    together = joined([values, other, rows_of_bytes(packed(other).flatten(), FP8, H)])
    made = quantize_rows(values)
    for got, parts in zip(together, zip(made, other, other, strict=True), strict=True):
        assert torch.equal(got.float(), torch.cat([part.float() for part in parts]))


def odd_scales(count: int) -> Quantized:
    """Rows that no quantizer has made: `quantize_rows` would choose other scales, and other values."""
    data = torch.randn(count, H, generator=fresh_generator()).to(torch.float8_e4m3fn)
    return Quantized(data, torch.rand(count, H // 128, generator=fresh_generator()) + 0.5)


@pytest.mark.parametrize("is_routed", [True, False])
@pytest.mark.parametrize("gate", [True, False])
def test_a_layer_takes_fp8_rows(runner: LayerRunner, gate: bool, is_routed: bool) -> None:
    """On a CPU as bf16; the router, and a gate of shared experts, read the same values."""
    shape = replace(SHAPE, num_shared_experts=1)
    weights = random_weights(shape, 3, "cpu")
    weights = replace(weights, shared_gate=torch.randn(H, generator=fresh_generator()) if gate else None)
    layer = MoELayer(shape, weights, resolve_backend("reference"))
    rows, given = odd_scales(9), routing(9) if is_routed else (None, None)
    assert layer.needs_floats is gate
    torch.testing.assert_close(layer(rows, *given), layer(as_floats(rows), *given))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 37, 700])
@pytest.mark.parametrize("source", ["bytes", "pinned", "gpu"])
def test_a_gpu_gives_the_bits_of_its_own_quantizer(count: int, source: str) -> None:
    places: dict[str, Place] = {"bytes": as_bytes, "pinned": pinned, "gpu": on_gpu}
    weights = random_weights(SHAPE, 3, "cuda")
    runner = LayerRunner(MoELayer(SHAPE, weights, resolve_backend("hopper")), device_of("cuda"))
    values, given = tokens(count), routing(count)
    request = layer_request(values, "BF16", given)
    expected = outputs(runner, [request])[0]
    states = places[source](packed(quantize_rows(values)))
    for _ in range(5):  # also when the step recurs
        fp8 = replace(request, hidden_states=states, datatype=FP8)
        assert torch.equal(outputs(runner, [fp8])[0], expected)
    mixed = outputs(runner, [replace(request, hidden_states=states, datatype=FP8), request])
    assert torch.equal(mixed[0], mixed[1])
    assert torch.equal(mixed[0], expected)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 37, 700])
@pytest.mark.parametrize(("values_in", "scales_in"), [(on_gpu, on_gpu), (on_gpu, pinned), (as_bytes, on_gpu)])
def test_a_gpu_takes_scales_from_elsewhere(count: int, values_in: Place, scales_in: Place) -> None:
    weights = random_weights(SHAPE, 3, "cuda")
    runner = LayerRunner(MoELayer(SHAPE, weights, resolve_backend("hopper")), device_of("cuda"))
    values, given = tokens(count), routing(count)
    request = layer_request(values, "BF16", given)
    expected = outputs(runner, [request])[0]
    made = quantize_rows(values)
    apart = replace(
        request,
        hidden_states=values_in(made.data.view(torch.uint8)),
        datatype=FP8,
        scales=scales_in(made.scales.contiguous()),
    )
    beside = replace(request, hidden_states=as_bytes(packed(made)), datatype=FP8)
    for _ in range(3):
        assert torch.equal(outputs(runner, [apart])[0], expected)
    for others in ([apart], [beside], [request, beside]):
        assert all(torch.equal(output, expected) for output in outputs(runner, [apart, *others]))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 37, 700])
@pytest.mark.parametrize("is_routed", [True, False])
def test_a_gpu_multiplies_the_callers_bits(count: int, is_routed: bool) -> None:
    """Alone, again, from scales apart, and beside a request in bf16: what the kernels give for these rows."""
    weights = random_weights(SHAPE, 3, "cuda")
    runner = LayerRunner(MoELayer(SHAPE, weights, resolve_backend("hopper")), device_of("cuda"))
    rows, given = odd_scales(count), routing(count) if is_routed else None
    there = Quantized(*(part.cuda() for part in rows))
    ids, gates = runner.layer.route(as_floats(there)) if given is None else (part.cuda() for part in given)
    expected = fused_experts(there, ids, gates, weights.gate_up, weights.down).cpu()
    request = replace(
        layer_request(tokens(count), "BF16", given), datatype=FP8, hidden_states=on_gpu(packed(rows))
    )
    for _ in range(5):  # also when the step recurs
        assert torch.equal(outputs(runner, [request])[0], expected)
    values, scales = on_gpu(rows.data.view(torch.uint8)), on_gpu(rows.scales)
    apart = replace(request, hidden_states=values, scales=scales)
    assert torch.equal(outputs(runner, [apart])[0], expected)
    if is_routed:
        mixed = outputs(runner, [layer_request(tokens(5), "BF16", routing(5)), request, apart])
        assert all(torch.equal(output, expected) for output in mixed[1:])
