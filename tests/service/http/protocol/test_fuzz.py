"""For any input, the parser returns a request or raises an OipError."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.protocol import OipError, parse_request
from expertd.service.memory import host_view

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
