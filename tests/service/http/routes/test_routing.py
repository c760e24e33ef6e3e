"""/v1/models/{model}/routing: the experts that infer would use, without using them."""

import asyncio

import numpy as np
import pytest

from tests.service.apps import (
    HIDDEN,
    MODEL,
    NUM_EXPERTS,
    TOP_K,
    error_of,
    hidden_request,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.runners import EchoRunner
from tests.service.waiting import until

PATH = "/v1/models/tiny/routing"


async def test_it_is_what_infer_uses() -> None:
    values = rows(9, seed=4)
    async with serving(tiny_settings()) as server:
        found = (await server.http.post(PATH, content=values.tobytes())).json()
        ids, weights = np.array(found["topk_ids"]), np.array(found["topk_weights"])
        assert ids.shape == weights.shape == (9, TOP_K)
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
        assert server.metric("expert_tokens_total", model="tiny", expert="0") == 0, (
            "no expert computed anything"
        )
        await server.infer(*hidden_request(values))
        await until(lambda: server.metric("tokens_total", model="tiny", layout="contiguous") == 9)
        computed = [
            server.metric("expert_tokens_total", model="tiny", expert=str(expert))
            for expert in range(NUM_EXPERTS)
        ]
    assert computed == np.bincount(ids.ravel(), minlength=NUM_EXPERTS).tolist()


@pytest.mark.parametrize("datatype", ["BF16", "FP16"])
async def test_rows_are_of_the_models_datatype(datatype: str) -> None:
    async with serving(tiny_settings(models=[{**MODEL, "datatype": datatype}])) as server:
        found = await server.http.post(PATH, content=bytes(3 * 2 * HIDDEN))
        assert len(found.json()["topk_ids"]) == 3


async def test_other_bodies_are_refused() -> None:
    rows_of = "body: expected rows of 512 bytes (128 FP32), at least one, got "
    nan = np.full(HIDDEN, np.nan, np.float32).tobytes()
    async with serving(tiny_settings()) as server:
        for body, status, expected in (
            (b"", 400, f"{rows_of}0 bytes"),
            (bytes(513), 400, f"{rows_of}513 bytes"),
            (bytes(65 * 1024), 413, "body: expected at most 65536 bytes, got at least 66560"),
            (nan, 400, "body: expected hidden states with finite weights"),
        ):
            assert error_of(await server.http.post(PATH, content=body), status).startswith(expected)


async def test_a_model_that_is_not_loaded_has_none() -> None:
    async with serving(tiny_settings()) as server:
        await server.http.post("/v2/repository/models/tiny/unload")
        unloaded = await server.http.post(PATH, content=rows(1).tobytes())
        assert "tiny" in error_of(unloaded, 404)
        unknown = await server.http.post("/v1/models/none/routing", content=rows(1).tobytes())
        assert error_of(unknown, 404) == "model: expected tiny, got 'none'"


async def test_without_a_router_in_this_process_it_is_409() -> None:
    async with serving(tiny_settings(), serving_runner(EchoRunner())) as server:
        answer = await server.http.post(PATH, content=rows(1).tobytes())
        assert error_of(answer, 409) == "routing: expected one rank, got 1"


async def test_many_callers_do_not_keep_steps_waiting() -> None:
    """Each waits for a step's end; between two steps, only one of them is answered."""
    async with serving(tiny_settings()) as server:
        calls = [server.http.post(PATH, content=rows(2).tobytes()) for _ in range(20)]
        infers = [server.infer(*hidden_request(rows(4))) for _ in range(20)]
        answers = await asyncio.gather(*calls, *infers)
    assert {answer.status_code for answer in answers} == {200}
