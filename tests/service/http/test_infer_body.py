"""Bodies that grow as they arrive; requests with the same JSON are parsed once, and get their own tensors."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.plans import Plans
from expertd.service.http.protocol import OipError, oip_error, parse_request
from expertd.service.inference.body import LARGE_BYTES, InferBody
from expertd.service.inference.errors import RequestError
from expertd.service.inference.limits import BodyLimit
from expertd.service.memory import Arena, Span, host_view
from expertd.service.moe.request import LayerRequest

MIB = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(4 * MIB)
    yield arena
    assert arena.used_bytes == 0
    arena.close()


def pattern(size: int) -> bytes:
    return bytes(i * 7 % 251 for i in range(size))


@pytest.mark.parametrize("piece", [1000, 50_000, LARGE_BYTES])
def test_a_body_of_unknown_length_grows(arena: Arena, piece: int) -> None:
    data = pattern(MIB)
    body = InferBody(arena, BodyLimit(MIB), None, 16)
    for begin in range(0, MIB, piece):
        body.write(memoryview(data)[begin : begin + piece])
        assert body.rest is None
    content = body.content()
    assert isinstance(content, Span)
    assert host_view(content) == data
    with pytest.raises(
        RequestError, match=f"body: expected at most {MIB} bytes, got at least {MIB + 1}"
    ) as caught:
        body.write(memoryview(b"x"))
    assert caught.value.reason == "body_too_large"
    body.release()


def test_without_room_it_is_refused(arena: Arena) -> None:
    other = arena.take(3 * MIB)
    assert other is not None
    growing = InferBody(arena, BodyLimit(2 * MIB), None, 0)
    growing.write(memoryview(bytes(300_000)))
    for write in (
        lambda: InferBody(arena, BodyLimit(2 * MIB), MIB, 0),
        lambda: growing.write(memoryview(bytes(600_000))),
    ):
        with pytest.raises(RequestError, match="max_buffered_bytes: expected memory") as caught:
            write()
        refusal = oip_error(caught.value)
        assert (refusal.status, refusal.reason) == (503, "memory_full")
        assert refusal.headers == {"Retry-After": "1"}
    growing.release()
    other.release()


SPEC = LayerSpec(name="m", hidden_size=4, top_k=2, datatype="FP32", max_request_tokens=8, max_json_bytes=1000)


def tensor(name: str, datatype: str, columns: int, size: int) -> dict[str, Any]:
    parameters = {"binary_data_size": size}
    return {"name": name, "shape": [1, columns], "datatype": datatype, "parameters": parameters}


HEADER = json.dumps(
    {
        "id": "same",
        "inputs": [
            tensor("topk_ids", "INT64", 2, 16),
            tensor("hidden_states", "FP32", 4, 16),
            tensor("topk_weights", "FP32", 2, 8),
        ],
        "outputs": [{"name": "hidden_states", "parameters": {"binary_data": True, "datatype": "FP16"}}],
        "parameters": {"timeout": 7},
    }
).encode()


def body(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    ids = np.array([seed, seed + 1], np.int64).tobytes()
    return HEADER + ids + rng.random(6, np.float32).tobytes()


def values(layer: LayerRequest) -> list[bytes]:
    tensors = (layer.hidden_states, layer.topk_ids, layer.topk_weights)
    return [bytes(host_view(tensor)) for tensor in tensors if tensor is not None]


def test_a_kept_plan_gives_what_parsing_gives() -> None:
    plans = Plans()
    assert plans.find(body(1), len(HEADER)) is None
    plans.parse(body(1), len(HEADER), SPEC)
    plan = plans.find(body(2), len(HEADER))
    assert plan is not None
    parsed = parse_request(body(2), len(HEADER), SPEC)
    layer = plan.layer(body(2), None)
    assert values(layer) == values(parsed.layer)
    assert (layer.num_tokens, layer.output_datatype, layer.topk_ids_datatype) == (1, "FP16", "INT64")
    assert (plan.request.id, plan.request.binary_output) == ("same", True)
    assert plan.request.timeout_seconds == 7e-6


def test_other_sizes_are_parsed_again_and_refused() -> None:
    plans = Plans()
    plans.parse(body(1), len(HEADER), SPEC)
    for wrong in (body(2)[:-1], body(2) + b"x"):
        assert plans.find(wrong, len(HEADER)) is None
        with pytest.raises(OipError):
            plans.parse(wrong, len(HEADER), SPEC)


def test_json_tensors_are_not_kept() -> None:
    plans = Plans()
    entry = {"name": "hidden_states", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    given = json.dumps({"inputs": [entry]}).encode()
    layer = plans.parse(given, len(given), SPEC).layer(given, None)
    assert np.frombuffer(host_view(layer.hidden_states), np.float32).tolist() == [1, 2, 3, 4]
    assert plans.find(given, len(given)) is None
    assert plans.parse(given, None, SPEC).num_tokens == 1


def test_few_plans_are_kept() -> None:
    plans = Plans()
    headers = [HEADER.replace(b"same", b"%d" % number) for number in range(100)]
    for header in headers:
        plans.parse(header + body(0)[len(HEADER) :], len(header), SPEC)
    found = [plans.find(header + body(0)[len(HEADER) :], len(header)) for header in headers]
    assert 1 <= sum(plan is not None for plan in found) <= 16
    assert found[-1] is not None
