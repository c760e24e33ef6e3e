"""For any input, the parser returns a request or raises an OipError."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.protocol import OipError, parse_request
from expertd.service.memory import (
    Arena,
    DeviceMemory,
    Region,
    Regions,
    RegionUses,
    Span,
    SystemMemory,
    host_view,
    nothing_to_register,
)
from tests.service.shm import shm_file

SPEC = LayerSpec(name="m", hidden_size=4, top_k=2, datatype="FP32", max_request_tokens=8, max_json_bytes=1000)

_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["hidden_states", "topk_ids", "topk_weights", "FP32", "BF16", "INT32", "\ud800"])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
_entry = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["hidden_states", "topk_ids", "topk_weights"]) | _json,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | _json,
        "datatype": st.sampled_from(["FP32", "FP16", "BF16", "INT32", "INT64"]) | _json,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 40) | _json})
        | _json,
        "data": st.lists(st.integers() | st.floats(allow_nan=False), max_size=8) | _json,
    },
)
_request = st.fixed_dictionaries(
    {},
    optional={
        "id": _json,
        "parameters": _json,
        "inputs": st.lists(_entry, max_size=4) | _json,
        "outputs": st.lists(_entry, max_size=2) | _json,
    },
)


def _parses_or_refuses(body: bytes, header_length: int | None) -> None:
    refusal: OipError | None = None
    try:
        request = parse_request(body, header_length, SPEC)
    except OipError as error:
        refusal = error
    if refusal is None:
        assert len(host_view(request.layer.hidden_states)) % SPEC.hidden_size == 0
    else:
        assert refusal.status == 400
        assert len(json.loads(refusal.body())["error"]) < 1000


@settings(max_examples=400)
@given(_request | _json, st.binary(max_size=40), st.integers(0, 300) | st.none())
@pytest.mark.slow
@pytest.mark.thorough
def test_any_json_parses_or_is_refused(value: Any, tail: bytes, length: int | None) -> None:
    header = json.dumps(value).encode()
    _parses_or_refuses(header + tail, len(header))
    _parses_or_refuses(header + tail, length)


SIZE = 4096


@pytest.fixture(scope="module")
def regions() -> Iterator[Regions]:
    """Regions "copied", "mapped" and "gpu", of 4096 bytes each."""
    regions = Regions(3, 3 * SIZE)
    with shm_file(SIZE) as file:
        memories: dict[str, SystemMemory | DeviceMemory] = {
            "copied": SystemMemory(file.key, 0, SIZE, None),
            "mapped": SystemMemory(file.key, 0, SIZE, nothing_to_register),
            "gpu": DeviceMemory(Span(1 << 20, SIZE, 0), lambda: None),
        }
        for name, memory in memories.items():
            regions.reserve(name, SIZE)
            regions.add(Region(name, "system", SIZE, memory, {}))
        yield regions
        for memory in memories.values():
            memory.close()


_number = st.integers(-1, 80) | st.sampled_from(
    [16, 32, SIZE - 16, SIZE, 2**62, 2**64, None, True, "16", 1.0]
)
_parameters: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "shared_memory_region": st.sampled_from(["copied", "mapped", "gpu", "none", "", 1, None, []]),
        "shared_memory_byte_size": _number,
        "shared_memory_offset": _number,
        "binary_data_size": _number,
        "binary_data": st.booleans(),
    },
)


def _tensor(name: str, columns: int, datatype: str) -> st.SearchStrategy[dict[str, Any]]:
    rows = st.sampled_from([1, 0, 2, 9])
    return st.builds(
        lambda count, parameters, element: {
            "name": name,
            "datatype": datatype,
            "shape": [count, columns],
            "parameters": {"shared_memory_byte_size": 4 * count * columns, **parameters} if element else {},
        },
        rows,
        _parameters,
        st.booleans(),
    )


_routing = st.tuples(_tensor("topk_ids", 2, "INT32"), _tensor("topk_weights", 2, "FP32"))
_placed_request = st.builds(
    lambda hidden, routing, outputs: {"inputs": [hidden, *routing], "outputs": outputs},
    _tensor("hidden_states", 4, "FP32"),
    st.just(()) | _routing,
    st.lists(st.builds(lambda p: {"name": "hidden_states", "parameters": p}, _parameters), max_size=1),
)


@pytest.mark.slow
@pytest.mark.thorough
@settings(max_examples=800)
@given(_placed_request, st.sampled_from([0, 16, 32]))
def test_any_place_parses_or_is_refused(regions: Regions, value: dict[str, Any], num_bytes: int) -> None:
    arena = Arena(1 << 16)
    body = json.dumps(value).encode()
    try:
        request = parse_request(
            body + bytes(num_bytes), len(body), SPEC, lambda: RegionUses(regions, arena.take)
        )
    except OipError as error:
        refused = error.status
    else:
        refused = 400
        if request.regions is not None:
            request.regions.load()
            request.regions.release()
    finally:
        arena.close()
    assert refused == 400
    assert [region.uses for region in regions.of_kind("system")] == [0, 0, 0]
