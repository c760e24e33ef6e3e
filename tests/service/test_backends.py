"""A backend is one folder and one line: with neither graphs nor request tables it loads and serves."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from expertd.backends import BACKENDS
from expertd.service.moe.runner import LayerRunner
from tests.backends import KINDS, plain_backend
from tests.service.apps import (
    MODEL,
    TOP_K,
    binary_request,
    error_of,
    hidden_request,
    output_of,
    rows,
    serving,
    tiny_settings,
)
from tests.service.moe.reference_layer import assert_close, reference_layer


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    with plain_backend(request.param):
        yield request.node.callspec.id


async def test_it_serves_as_the_float64_layer_does(kind: str) -> None:
    async with serving(tiny_settings(backend="plain")) as server:
        engine = server.app.engine
        assert engine.loaded is not None
        assert engine.loaded.backend == "plain"
        runner = engine.loaded.runners["tiny"]
        assert isinstance(runner, LayerRunner)
        weights = runner.layer.weights

        async def infer(num_tokens: int, seed: int, routes: bool) -> None:
            values, generator = rows(num_tokens, seed), np.random.default_rng(seed)
            ids = np.array([generator.permutation(4)[:TOP_K] for _ in range(num_tokens)], np.int32)
            of = generator.random((num_tokens, TOP_K), np.float32)
            body = hidden_request(values)
            if not routes:
                given = {
                    "hidden_states": ("FP32", [*values.shape], values.tobytes()),
                    "topk_ids": ("INT32", [*ids.shape], ids.tobytes()),
                    "topk_weights": ("FP32", [*of.shape], of.tobytes()),
                }
                body = binary_request(given, parameters={"binary_data_output": True})
            out = torch.tensor(output_of(await server.infer(*body)))
            given_ids, given_weights = (None if routes else torch.tensor(each) for each in (ids, of))
            expected = reference_layer(
                torch.tensor(values), weights, TOP_K, topk_ids=given_ids, topk_weights=given_weights
            )
            assert_close(out, expected)

        for _ in range(4):  # steps that recur stay eager, too
            await infer(16, 1, True)
        await asyncio.gather(*(infer(tokens, tokens, tokens % 3 > 0) for tokens in (1, 2, 3, 7, 33, 64)))
        launches = engine.loaded.use().launches["tiny"]
        assert (launches.graph, launches.recurring) == (0, 0)
        assert (launches.host if kind == "host" else launches.eager) > 4

        config = (await server.http.get("/v2/models/tiny/config")).json()
        assert config["instance_group"][0]["kind"] == ("KIND_GPU" if kind == "gpu" else "KIND_CPU")
        refused = await server.http.put("/v1/partitions", json={"partitions": {"a": 8}})
        assert "'plain'" in error_of(refused, 409)
        for action in ("unload", "load"):
            answer = await server.http.post(f"/v2/repository/models/tiny/{action}")
            assert answer.status_code == 200, answer.text
        await infer(5, 5, True)


def test_settings_ask_what_it_can(kind: str) -> None:
    assert tiny_settings(backend="plain").backend == "plain"
    assert tuple(BACKENDS)[-1] == "plain"
    with pytest.raises(ValueError, match="devices: expected backend hopper, got 'plain'"):
        tiny_settings(backend="plain", devices="0-1")


async def test_partitions_in_its_settings_are_refused(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    models = [{**MODEL, "partition": "a"}]
    async with serving(tiny_settings(backend="plain", partitions={"a": 8}, models=models)) as server:
        assert server.app.engine.loaded is None
    assert "expected a backend whose device has SMs to partition, got 'plain'" in caplog.text
