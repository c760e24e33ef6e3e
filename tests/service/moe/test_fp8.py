"""FP8 hidden states: rows of e4m3 values and their scales."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from expertd.kernels import Quantized, dequantize_rows, expand_rows, quantize_rows, resolve_backend
from expertd.service.engine.chunks import part_of
from expertd.service.moe.batch import expanded
from expertd.service.moe.batch import rows_of as rows_of_bytes
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import FP8, LayerRequest, fp8_rows, row_bytes
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import random_weights
from tests.kernels.helpers import fresh_generator
from tests.service.moe.requests import Place, as_bytes, layer_request, on_gpu, pinned, rows_of

SHAPE = LayerShape(hidden_size=512, intermediate_size=256, num_experts=8, top_k=2)
H = SHAPE.hidden_size


@pytest.fixture(scope="module")
def runner() -> LayerRunner:
    return LayerRunner(MoELayer(SHAPE, random_weights(SHAPE, 3, "cpu"), resolve_backend("reference")), "cpu")


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
    beside = expanded(rows_of_bytes(packed(made).flatten(), FP8, H))
    values, apart = (each.view(torch.uint8).flatten() for each in (made.data, scales))
    assert torch.equal(expanded(rows_of_bytes(values, FP8, H, apart)), beside)
    assert torch.equal(beside, expand_rows(made.data, scales))


def test_scales_of_another_origin_are_used() -> None:
    data = torch.randn(3, H, generator=fresh_generator()).to(torch.float8_e4m3fn)
    scales = torch.rand(3, H // 128, generator=fresh_generator())
    torch.testing.assert_close(expand_rows(data, scales), dequantize_rows(data, scales), rtol=3e-7, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 37, 700])
@pytest.mark.parametrize("source", ["bytes", "pinned", "gpu"])
def test_a_gpu_gives_the_bits_of_its_own_quantizer(count: int, source: str) -> None:
    places: dict[str, Place] = {"bytes": as_bytes, "pinned": pinned, "gpu": on_gpu}
    weights = random_weights(SHAPE, 3, "cuda")
    runner = LayerRunner(MoELayer(SHAPE, weights, resolve_backend("hopper")), "cuda")
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
    runner = LayerRunner(MoELayer(SHAPE, weights, resolve_backend("hopper")), "cuda")
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
