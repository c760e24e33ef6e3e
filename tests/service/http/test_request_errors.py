"""Invalid requests: the status, one error format, and the next request works."""

import gc
import gzip
import json
import logging
import re
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from tests.service.apps import (
    HIDDEN,
    MODEL,
    binary_request,
    error_of,
    hidden_request,
    output_of,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.runners import EchoRunner
from tests.service.sockets import INFER

GOOD = hidden_request(rows(3))


def routed(ids: list[int], weights: list[float], **more: Any) -> tuple[bytes, int]:
    """A token for these experts."""
    tensors = {
        "hidden_states": ("FP32", [1, HIDDEN], rows(1).tobytes()),
        "topk_ids": ("INT32", [1, 2], np.array(ids, np.int32).tobytes()),
        "topk_weights": ("FP32", [1, 2], np.array(weights, np.float32).tobytes()),
    }
    return binary_request(tensors, **more)


async def test_invalid_routing_is_refused() -> None:
    async with serving(tiny_settings()) as server:
        for ids, weights, expected in (
            ([0, 5], [0.5, 0.5], "topk_ids"),
            ([-2, 0], [0.5, 0.5], "topk_ids"),
            ([1, 1], [0.5, 0.5], "topk_ids"),
            ([0, 1], [float("nan"), 0.5], "topk_weights"),
            ([0, 1], [float("inf"), 0.5], "topk_weights"),
        ):
            text = error_of(await server.infer(*routed(ids, weights, id="r")), 400)
            assert expected in text
            assert text.endswith("(request id: r)")
            output_of(await server.infer(*GOOD))


GET_ONLY = "GET, HEAD or OPTIONS"
ERRORS: list[tuple[str, str, int, str]] = [
    ("OPTIONS", "/none", 404, "path: expected one of this API (see /docs), got '/none'"),
    ("GET", "/none", 404, "path: expected one of this API (see /docs), got '/none'"),
    ("GET", "/v2/", 404, "path: expected one of this API (see /docs), got '/v2/'"),
    ("GET", "/v2/models/other", 404, "model: expected tiny, got 'other'"),
    ("GET", "/v2/models/other/ready", 404, "model: expected a served one, got 'other'"),
    ("GET", "/v2/models/tiny/versions/2", 404, "version of model tiny: expected 1, got '2'"),
    ("POST", "/v2/models/other/infer", 404, "model: expected tiny, got 'other'"),
    ("POST", "/v2/models/tiny/versions/2/infer", 404, "version of model tiny: expected 1, got '2'"),
    ("GET", INFER, 405, f"method: expected OPTIONS or POST at '{INFER}', got"),
    ("PUT", INFER, 405, f"method: expected OPTIONS or POST at '{INFER}', got"),
    ("POST", "/v2/health/live", 405, f"method: expected {GET_ONLY} at '/v2/health/live', got"),
    ("POST", "/openapi.json", 405, f"method: expected {GET_ONLY} at '/openapi.json', got 'POST'"),
    ("DELETE", "/v1/partitions", 405, "method: expected GET, HEAD, OPTIONS or PUT at '/v1/partitions', got"),
    ("GET", "/v2/repository/index", 405, "method: expected OPTIONS or POST at '/v2/repository/index', got"),
    ("POST", INFER, 400, "request: expected JSON, got invalid JSON: "),
    ("GET", "/v1/partitions", 409, "partitions: expected a backend whose device has SMs"),
]
LONG = "x" * 60_000
LONG_VALUES: list[tuple[str, str, dict[str, str], Any, int]] = [
    ("GET", f"/{LONG}", {}, None, 404),
    ("GET", f"/v2/models/{LONG}", {}, None, 404),
    ("POST", f"/v2/models/{LONG}/infer", {}, None, 404),
    ("GET", f"/v2/models/tiny/versions/{LONG}", {}, None, 404),
    ("DELETE", f"/v2/models/{LONG}/infer", {}, None, 405),
    ("POST", INFER, {"Content-Encoding": LONG}, None, 415),
    ("POST", INFER, {"Inference-Header-Content-Length": LONG}, None, 400),
    ("POST", INFER, {}, {"id": LONG}, 400),
    ("POST", INFER, {}, {"inputs": [{"name": LONG}]}, 400),
    ("POST", "/v2/repository/index", {}, {"ready": LONG}, 400),
    ("PUT", "/v1/partitions", {}, {"partitions": {LONG: 8}}, 422),
    ("PUT", "/v1/partitions", {}, {"partitions": {}, LONG: 8}, 422),
    ("PUT", "/v1/partitions", {}, {"partitions": dict.fromkeys(range(999), 8)}, 422),
]


async def test_errors_have_one_format_and_shorten_long_values() -> None:
    async with serving(tiny_settings()) as server:
        for method, path, status, expected in ERRORS:
            response = await server.http.request(method, path)
            assert expected in error_of(response, status)
            if status == 405:
                allowed = response.headers["allow"].split(", ")
                assert allowed
                assert all(method in error_of(response, 405) for method in allowed)
        for method, path, headers, body, status in LONG_VALUES:
            content = b"" if body is None else json.dumps(body).encode()
            response = await server.http.request(method, path, headers=headers, content=content)
            assert len(error_of(response, status)) < 400


async def test_an_unknown_model_gets_the_first_names_of_many() -> None:
    models = [{**MODEL, "name": f"layer_{i}"} for i in range(58)]
    async with serving(tiny_settings(models=models), serving_runner(EchoRunner())) as server:
        text = error_of(await server.http.get("/v2/models/other"), 404)
    named = ", ".join(f"layer_{i}" for i in range(8))
    assert text == f"model: expected {named} or 50 more, got 'other'"


async def test_header_lengths_are_one_number() -> None:
    body, length = GOOD
    name = "Inference-Header-Content-Length"
    async with serving(tiny_settings()) as server:
        for wrong in ("-1", "x", "1e3", "9" * 30, "", "+5"):
            text = error_of(await server.infer(body, Inference_Header_Content_Length=wrong), 400)
            assert text == f"{name}: expected a number of bytes, got {wrong!r}"
        output_of(await server.http.post(INFER, content=body, headers=2 * [(name, str(length))]))
        other = [(name, str(length)), (name, "11")]
        text = error_of(await server.http.post(INFER, content=body, headers=other), 400)
        assert text == f"{name}: expected one number of bytes, got {length} and 11"


async def test_bodies_beyond_the_limit_are_refused_with_and_without_content_length() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(1000)

    async with serving(tiny_settings(limits={"max_body_bytes": 10_000})) as server:
        assert (
            error_of(await server.infer(bytes(10_001)), 413)
            == "body: expected at most 10000 bytes, got at least 10001"
        )
        response = await server.http.post("/v2/models/tiny/infer", content=chunks())
        assert error_of(response, 413) == "body: expected at most 10000 bytes, got at least 11000"
        output_of(await server.infer(*GOOD))


async def test_too_many_tokens_are_no_full_queue() -> None:
    """The headers show that they never fit."""
    async with serving(tiny_settings({"max_queue_tokens": 64})) as server:
        response = await server.infer(*hidden_request(rows(200)))
        text = "request: expected at most 64 tokens, got at least 1[0-9]+"
        assert re.fullmatch(text, error_of(response, 400))
        assert "retry-after" not in response.headers


async def test_a_failing_step_is_a_500_and_the_next_request_works(caplog: pytest.LogCaptureFixture) -> None:
    runner = EchoRunner(poison=666.0)
    bad = np.full((1, HIDDEN), 666.0, np.float32)
    async with serving(tiny_settings(), serving_runner(runner)) as server:
        with caplog.at_level(logging.CRITICAL):
            text = error_of(await server.infer(*hidden_request(bad, id="p")), 500)
        assert text == "the step failed: RuntimeError (request id: p)"
        output_of(await server.infer(*GOOD))


async def test_an_internal_error_is_a_500_in_the_same_format(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(EchoRunner):
        def validate(self, request: Any) -> None:
            raise ZeroDivisionError

    async with serving(tiny_settings(), serving_runner(Broken())) as server:
        error_of(await server.infer(*routed([0, 1], [1, 0])), 500)
        output_of(await server.infer(*GOOD))
    assert "ZeroDivisionError" in caplog.text


BYTES = 1 << 20
TOO_MANY, LENGTH = hidden_request(rows(65))
ZIPPED = gzip.compress(TOO_MANY + bytes(BYTES))
TEXT = b'{"inputs": "' + b"x" * BYTES + b'"}'


@pytest.mark.parametrize(
    ("body", "length", "headers"), [(ZIPPED, LENGTH, {"Content_Encoding": "gzip"}), (TEXT, None, {})]
)
async def test_refused_bodies_do_not_wait_for_the_garbage_collector(
    body: bytes, length: int | None, headers: dict[str, str]
) -> None:
    settings = tiny_settings({"max_body_bytes": 2 * BYTES, "max_json_bytes": 2 * BYTES})
    async with serving(settings) as server:
        error_of(await server.infer(body, length, **headers), 400)
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            for _ in range(10):
                error_of(await server.infer(body, length, **headers), 400)
            assert tracemalloc.get_traced_memory()[0] < 4 * BYTES
        finally:
            tracemalloc.stop()
            gc.enable()
