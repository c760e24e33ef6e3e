"""The runner: bytes in and out, mixed requests in one step, and invalid routing."""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd.kernels import resolve_backend
from expertd.service.device import device_of
from expertd.service.memory import host_view
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.request import OutputMemory
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.step.device_step import without_outside
from expertd.service.moe.weights import random_weights
from tests.backends import KINDS, plain_backend
from tests.kernels.helpers import diff, fresh_generator
from tests.service.moe.reference_layer import assert_close, reference_layer
from tests.service.moe.requests import DTYPES, as_bytes, layer_request, rows_of

SHAPE = LayerShape(hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)


@pytest.fixture(scope="module", params=[None, *KINDS])
def runner(request: pytest.FixtureRequest) -> Iterator[LayerRunner]:
    kind = request.param
    with nullcontext() if kind is None else plain_backend(kind):
        backend = resolve_backend("reference" if kind is None else "plain")
        weights = random_weights(SHAPE, 3, backend.device)
        layer = MoELayer(SHAPE, weights, backend, masked_max_tokens=4)
        yield LayerRunner(layer, device_of(backend.device))


def _hidden_states(num_tokens: int) -> Tensor:
    return torch.randn(num_tokens, SHAPE.hidden_size, generator=fresh_generator())


def _routing(num_tokens: int) -> tuple[Tensor, Tensor]:
    generator = fresh_generator()
    ids = torch.rand(num_tokens, SHAPE.num_experts, generator=generator).argsort(1)[:, : SHAPE.top_k]
    return ids, torch.rand(num_tokens, SHAPE.top_k, generator=generator)


def _output(output: OutputMemory, datatype: str = "FP32") -> Tensor:
    return rows_of(output, datatype, SHAPE.hidden_size)


@pytest.mark.parametrize("output_datatype", DTYPES)
@pytest.mark.parametrize("datatype", DTYPES)
def test_every_pair_of_datatypes(runner: LayerRunner, datatype: str, output_datatype: str) -> None:
    hidden_states = _hidden_states(3)
    result = runner.run([layer_request(hidden_states, datatype, output_datatype=output_datatype)])
    expected = reference_layer(hidden_states.to(DTYPES[datatype]), runner.layer.weights, SHAPE.top_k)
    assert len(host_view(result.outputs[0])) == 3 * SHAPE.hidden_size * DTYPES[output_datatype].itemsize
    assert_close(_output(result.outputs[0], output_datatype), expected)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_mixed_requests_in_one_step_get_their_own_results(
    runner: LayerRunner, ids_dtype: torch.dtype
) -> None:
    sizes, datatypes = [3, 1, 5, 2], ["FP32", "BF16", "FP16", "FP32"]
    requests, expected = [], []
    for index, (num_tokens, datatype) in enumerate(zip(sizes, datatypes, strict=True)):
        hidden_states, given, routing = _hidden_states(num_tokens).to(DTYPES[datatype]), None, {}
        if index % 2:
            ids, weights = _routing(num_tokens)
            given, routing = (ids.to(ids_dtype), weights), {"topk_ids": ids, "topk_weights": weights}
        requests.append(layer_request(hidden_states, datatype, given, output_datatype=datatype))
        expected.append(reference_layer(hidden_states, runner.layer.weights, SHAPE.top_k, **routing))  # type: ignore[arg-type]
    for request in requests:
        runner.validate(request)
    result = runner.run(requests)
    assert result.num_tokens == 11
    assert result.layout == "contiguous"
    assert result.compute_seconds > 0
    assert len(result.tokens_per_expert) == SHAPE.num_experts
    assert sum(result.tokens_per_expert) == 11 * SHAPE.top_k
    for output, datatype, rows in zip(result.outputs, datatypes, expected, strict=True):
        assert_close(_output(output, datatype), rows)


def test_given_routing_in_every_request(runner: LayerRunner) -> None:
    hidden_states = _hidden_states(3)
    ids, weights = torch.tensor([[7, 0]] * 3), torch.tensor([[0.25, -2.0]] * 3)
    request = layer_request(hidden_states, "FP32", (ids, weights))
    runner.validate(request)
    result = runner.run([request])
    assert result.layout == "masked"
    assert list(result.tokens_per_expert) == [3, 0, 0, 0, 0, 0, 0, 3]
    expected = reference_layer(
        hidden_states, runner.layer.weights, SHAPE.top_k, topk_ids=ids, topk_weights=weights
    )
    assert_close(_output(result.outputs[0]), expected)


def test_nan_stays_in_its_own_request(runner: LayerRunner) -> None:
    good, bad = _hidden_states(5), _hidden_states(2)  # in the same layout, alone or together
    alone = _output(runner.run([layer_request(good, "FP32")]).outputs[0])
    bad[0, 3] = math.nan
    together = [
        _output(each) for each in runner.run([layer_request(each, "FP32") for each in (bad, good)]).outputs
    ]
    assert together[0][0].isnan().all()
    assert together[0][1].isfinite().all()
    assert diff(together[1], alone) < 1e-4


def test_invalid_routing_is_rejected(runner: LayerRunner) -> None:
    hidden_states, weights = _hidden_states(2), torch.ones(2, 2)
    infinite = weights.clone()
    infinite[1, 0] = math.inf
    outside = "topk_ids: expected 0 to 7, or for no expert -1 or 8"
    cases = [
        ([[0, 1], [9, 2]], weights, f"{outside}, got 9 in token 1, slot 0"),
        ([[0, -2], [3, 2]], weights, f"{outside}, got -2 in token 0, slot 1"),
        ([[0, 1], [5, 5]], weights, r"topk_ids: expected distinct experts, got \[5, 5\] in token 1"),
        ([[0, 1], [2, 3]], infinite, "topk_weights: expected finite numbers, got inf in token 1, slot 0"),
        ([[0, 1], [2, 3]], weights * math.nan, "expected finite numbers, got nan in token 0, slot 0"),
        ([[-1, 8], [8, 3]], weights * math.nan, "expected finite numbers, got nan in token 1, slot 1"),
        ([[0, 1], [2, 3]], None, "topk_ids and topk_weights: expected both or neither, got topk_ids alone"),
        (None, weights, "expected both or neither, got topk_weights alone"),
        ([[0, 2**32], [2, 3]], weights, f"{outside}, got 4294967296 in token 0, slot 1"),
        ([[0, 2**32 - 1], [2, 3]], weights, f"{outside}, got 4294967295 in token 0, slot 1"),
    ]
    for ids, topk_weights, message in cases:
        request = replace(
            layer_request(hidden_states),
            topk_ids=None if ids is None else as_bytes(torch.tensor(ids)),
            topk_ids_datatype="INT64",
            topk_weights=None if topk_weights is None else as_bytes(topk_weights),
        )
        with pytest.raises(ValueError, match=message):
            runner.validate(request)


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 511, 512, 3000])
def test_one_invalid_id_is_found_among_many(runner: LayerRunner, num_tokens: int) -> None:
    random = np.random.default_rng(num_tokens)
    ids = np.argsort(random.random((num_tokens, 8)), axis=1)[:, :2]
    hidden_states, weights = _hidden_states(num_tokens), torch.ones(num_tokens, 2)

    def validate(ids: NDArray[np.int64]) -> None:
        runner.validate(layer_request(hidden_states, "FP32", (torch.from_numpy(ids), weights)))

    validate(ids)
    for none in (-1, 8):
        changed = ids.copy()
        changed[-1] = changed[0, 0] = none
        validate(changed)
    for wrong in (9, -2, 2**32, ids[-1, 0]):
        changed = ids.copy()
        changed[-1, 1] = wrong
        with pytest.raises(ValueError, match=f"in token {num_tokens - 1}"):
            validate(changed)


def test_ids_in_a_gpus_memory_that_name_no_expert_are_all_the_same() -> None:
    """Before they become int32."""
    ids = torch.tensor([[3, 2**32 + 3, -(2**32)], [-1, 2**31, -(2**31)], [7, 8, 0]])
    assert without_outside(ids, 8).tolist() == [[3, -1, -1], [-1, -1, -1], [7, -1, 0]]
    narrow = torch.tensor([-(2**31), -2, -1, 0, 7, 8, 9, 2**31 - 1], dtype=torch.int32)
    assert without_outside(narrow, 8).tolist() == [-1, -1, -1, 0, 7, -1, -1, -1]
    assert without_outside(narrow, 8).dtype == torch.int32
