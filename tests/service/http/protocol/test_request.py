"""Parsing infer requests: what is accepted, and the error for everything else."""

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.protocol import OipError, parse_request
from expertd.service.memory import host_view
from expertd.service.moe.request import LayerRequest

SPEC = LayerSpec(name="m", hidden_size=4, top_k=2, datatype="FP32", max_request_tokens=8, max_json_bytes=1000)
INPUTS = "hidden_states, hidden_states_scale, topk_ids or topk_weights"
ONE_ROW = {"name": "hidden_states", "shape": [1, 4], "datatype": "FP32", "data": [1, 2.5, -3, 0]}
IDS = {"name": "topk_ids", "shape": [1, 2], "datatype": "INT32", "data": [[0, 3]]}
WEIGHTS = {"name": "topk_weights", "shape": [1, 2], "datatype": "FP32", "data": [[0.25, 0.75]]}
BINARY_ROW = {k: v for k, v in ONE_ROW.items() if k != "data"} | {"parameters": {"binary_data_size": 16}}


def refusal(body: bytes, length: int | None = None, spec: LayerSpec = SPEC) -> str:
    """Why a body is refused, which blames the caller."""
    with pytest.raises(OipError) as caught:
        parse_request(body, length, spec)
    assert caught.value.status == 400
    return caught.value.message


def request_body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": inputs, **more}).encode()


def test_a_json_request() -> None:
    request = parse_request(request_body(ONE_ROW, IDS, WEIGHTS, id="a"), None, SPEC)
    assert request.id == "a"
    assert not request.binary_output
    assert request.layer.num_tokens == 1
    assert np.frombuffer(host_view(request.layer.hidden_states), np.float32).tolist() == [1, 2.5, -3, 0]
    assert request.layer.topk_ids is not None
    assert np.frombuffer(host_view(request.layer.topk_ids), np.int32).tolist() == [0, 3]
    assert request.layer.topk_weights is not None
    assert np.frombuffer(host_view(request.layer.topk_weights), np.float32).tolist() == [0.25, 0.75]
    assert request.layer.output_datatype == "FP32"


def test_a_binary_request_stays_a_view_of_the_body_and_may_be_mixed_with_json() -> None:
    data = np.arange(4, dtype=np.float32).tobytes()
    ids = {"name": "topk_ids", "shape": [1, 2], "datatype": "INT64", "parameters": {"binary_data_size": 16}}
    header = request_body(WEIGHTS, BINARY_ROW, ids)
    request = parse_request(header + data + np.array([1, 2], np.int64).tobytes(), len(header), SPEC)
    assert isinstance(request.layer.hidden_states, memoryview)
    assert request.layer.hidden_states == data
    assert request.layer.topk_ids_datatype == "INT64"
    assert request.layer.topk_ids is not None
    assert np.frombuffer(host_view(request.layer.topk_ids), np.int64).tolist() == [1, 2]


def test_a_raw_request_is_rows_of_the_models_datatype() -> None:
    request = parse_request(bytes(32), 0, SPEC)
    assert (request.layer.num_tokens, request.layer.datatype, request.binary_output) == (2, "FP32", True)


@pytest.mark.parametrize(
    ("more", "binary", "datatype"),
    [
        ({}, False, "FP32"),
        ({"outputs": []}, False, "FP32"),
        ({"parameters": {"binary_data_output": True}}, True, "FP32"),
        ({"outputs": [{"name": "hidden_states"}]}, False, "FP32"),
        ({"outputs": [{"name": "hidden_states", "parameters": {"binary_data": True}}]}, True, "FP32"),
        (
            {
                "parameters": {"binary_data_output": True},
                "outputs": [{"name": "hidden_states", "parameters": {"binary_data": False}}],
            },
            False,
            "FP32",
        ),
        (
            {"parameters": {"binary_data_output": True}, "outputs": [{"name": "hidden_states"}]},
            True,
            "FP32",
        ),
        ({"outputs": [{"name": "hidden_states", "parameters": {"datatype": "BF16"}}]}, False, "BF16"),
    ],
)
def test_outputs_in_binary_and_of_another_datatype(more: dict[str, Any], binary: bool, datatype: str) -> None:
    request = parse_request(request_body(ONE_ROW, **more), None, SPEC)
    assert request.binary_output is binary
    assert request.layer.output_datatype == datatype


def test_the_timeout_is_in_microseconds_and_zero_means_none() -> None:
    body = request_body(ONE_ROW, parameters={"timeout": 1500})
    assert parse_request(body, None, SPEC).timeout_seconds == 0.0015
    assert parse_request(request_body(ONE_ROW, parameters={"timeout": 0}), None, SPEC).timeout_seconds is None


@pytest.mark.parametrize(("given", "expected"), [({}, 128), ({"priority": 0}, 128), ({"priority": 255}, 255)])
def test_the_priority_is_128_unless_given(given: dict[str, int], expected: int) -> None:
    assert parse_request(request_body(ONE_ROW, parameters=given), None, SPEC).priority == expected


def test_unknown_parameters_are_ignored() -> None:
    parse_request(request_body(ONE_ROW, parameters={"mine": 1, "sequence_id": 0}), None, SPEC)
    tensor = ONE_ROW | {"parameters": {"content_type": "np"}}
    output = {"name": "hidden_states", "parameters": {"mine": {}}}
    parse_request(request_body(tensor, outputs=[output]), None, SPEC)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            {"parameters": {"binary_data": True}},
            "binary_data of the request: expected it at an output, got true",
        ),
        (
            {"parameters": {"datatype": "BF16"}},
            "datatype of the request: expected it at an output, got 'BF16'",
        ),
        (
            {"parameters": {"binary_data_size": 8}},
            "binary_data_size of the request: expected it at an input, got 8",
        ),
        (
            {"parameters": {"shared_memory_offset": 8}},
            "shared_memory_offset of the request: expected it at a tensor, got 8",
        ),
        (
            {"inputs": [ONE_ROW | {"parameters": {"timeout": 5}}]},
            "timeout of input hidden_states: expected it at the request, got 5",
        ),
        (
            {"outputs": [{"name": "hidden_states", "parameters": {"binary_data_output": False}}]},
            "binary_data_output of output hidden_states: expected it at the request, got false",
        ),
    ],
)
def test_a_parameter_in_the_wrong_place_is_refused(more: dict[str, Any], expected: str) -> None:
    body = json.dumps({"inputs": [ONE_ROW], **more}).encode()
    assert refusal(body) == f"parameter {expected} here"


def one(**changes: Any) -> bytes:
    """A request whose only input has these changes; None: without the field."""
    return request_body({name: value for name, value in (ONE_ROW | changes).items() if value is not None})


def asked(**parameters: Any) -> bytes:
    return request_body(ONE_ROW, parameters=parameters)


def output(name: str = "hidden_states", **parameters: Any) -> bytes:
    return request_body(ONE_ROW, outputs=[{"name": name, "parameters": parameters}])


SHAPE = "shape of input hidden_states: expected two sizes of 0 to 2^31 - 1, [tokens, columns], got "
DATA = "data of input hidden_states: expected "
INPUT = "input hidden_states: expected "
ROUTING = "inputs topk_ids and topk_weights: expected both or neither, got "
TOO_LONG = b'{"inputs": [' + b"1" * 5000 + b"]}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "request: expected JSON, got invalid JSON: "),
        (b"{", "request: expected JSON, got invalid JSON: "),
        (b"\xff\xfe", "request: expected JSON in UTF-8, got invalid start byte"),
        (b"[]", "request: expected a JSON object, got []"),
        (b"[" * 100_000, "request: expected JSON with at most 1024 [, got 100000"),
        (TOO_LONG, "request: expected integers of at most 4300 digits in JSON, got a longer one"),
        (b'{"a": NaN}', "request: expected finite numbers in JSON, got NaN; send the tensor in binary"),
        (b'{"a": -Infinity}', "request: expected finite numbers in JSON, got -Infinity; "),
        (b"{}", "inputs: expected an array of objects, got null"),
        (b'{"inputs": [1]}', "inputs: expected an array of objects, got [1]"),
        (request_body(), "inputs: expected hidden_states, got none"),
        (request_body(IDS, WEIGHTS), "inputs: expected hidden_states, got topk_ids, topk_weights"),
        (request_body(ONE_ROW, id=3), "id: expected a string, got 3"),
        (request_body(ONE_ROW, parameters=[]), "parameters of the request: expected an object, got []"),
        (asked(binary_data_output=1), "parameter binary_data_output: expected true or false, got 1"),
        (
            asked(timeout=-1),
            "parameter timeout: expected an integer of microseconds from 0 (none) to 2^63 - 1, got",
        ),
        (asked(priority=256), "parameter priority: expected an integer from 0 to 255, got 256"),
        (
            asked(sequence_id="s"),
            "parameter sequence_id of the request: expected none (not supported), got 's'",
        ),
        (request_body(ONE_ROW, ONE_ROW), f"{INPUT}once, got twice"),
        (one(name="x"), f"name of an input: expected {INPUTS}, got 'x'"),
        (one(name=["x"]), f"name of an input: expected {INPUTS}, got ['x']"),
        (
            one(datatype="FP4"),
            "datatype of input hidden_states: expected BF16, FP16, FP32, FP8 or UINT8, got 'FP4'",
        ),
        (one(shape=[4]), f"{SHAPE}[4]"),
        (one(shape=[-1, 4]), f"{SHAPE}["),
        (one(shape=[True, 4]), f"{SHAPE}["),
        (one(shape=[2**31, 4]), f"{SHAPE}[2147483648, 4]"),
        (one(shape=[10**30, 4]), f"{SHAPE}["),
        (one(shape=[2, 2]), "shape of input hidden_states: expected [2, 4], got [2, 2]"),
        (one(shape=[1, 3], data=[1]), "shape of input hidden_states: expected [1, 4], got [1, 3]"),
        (one(shape=[9, 4], data=None), "request: expected at most 8 tokens, got 9"),
        (one(shape=[9, 4], data=[0] * 36), "request: expected at most 8 tokens, got 9"),
        (one(shape=[2, 4]), f"{DATA}8 numbers, got 4"),
        (one(data=1), f"{DATA}an array of numbers, got 1"),
        (one(data=[[1, 2, 3]]), "row 0 of data of input hidden_states: expected 4 numbers, got 3 numbers"),
        (one(data=[[1, 2, 3, 4], 5]), f"{DATA}1 rows for shape [1, 4], got 2"),
        (one(data=[1, 2, 3, True]), f"{DATA}numbers for FP32, got true or false"),
        (one(data=[1, 2, 3, None]), f"{DATA}numbers for FP32, got null"),
        (one(data=["1", 2, 3, 4]), f"{DATA}numbers for FP32, got text"),
        (one(data=[[{}, 2, [3], None]]), f"{DATA}numbers for FP32, got an array, an object, null"),
        (one(data=[1e300, 0, 0, 0]), f"{DATA}numbers that fit FP32, got 1e+300 at 0"),
        (one(data=[10**400, 0, 0, 0]), f"{DATA}numbers that fit FP32, got a larger one"),
        (one(data=None), f"{INPUT}data or the parameter binary_data_size, got neither"),
        (
            one(parameters={"binary_data_size": 16}),
            f"{INPUT}data or the parameter binary_data_size, got both",
        ),
        (
            one(parameters={"shared_memory_region": "r"}),
            "parameter shared_memory_byte_size of input hidden_states: expected a number of bytes, got null",
        ),
        (request_body(BINARY_ROW), f"{INPUT}16 bytes after the JSON, got 0"),
        (request_body(ONE_ROW, IDS), f"{ROUTING}topk_ids alone"),
        (request_body(ONE_ROW, WEIGHTS), f"{ROUTING}topk_weights alone"),
        (
            request_body(ONE_ROW, IDS | {"shape": [5000, 2], "data": []}, WEIGHTS),
            "shape of input topk_ids: expected [1, 2], got [5000, 2]",
        ),
        (
            request_body(ONE_ROW, IDS | {"data": [0, 1.0]}, WEIGHTS),
            "data of input topk_ids: expected integers for INT32, got a float",
        ),
        (
            request_body(ONE_ROW, IDS | {"data": [0, 2**31]}, WEIGHTS),
            "data of input topk_ids: expected numbers that fit INT32, got a larger one",
        ),
        (output("y"), "name of an output: expected hidden_states, got 'y'"),
        (
            output(datatype="INT8"),
            "datatype of output hidden_states: expected BF16, FP16 or FP32, got 'INT8'",
        ),
        (
            output(classification=3),
            "parameter classification of output hidden_states: expected none (not supported), got 3",
        ),
        (
            request_body(ONE_ROW, outputs=[{"name": "hidden_states"}] * 2),
            "output hidden_states: expected once, got 2 times",
        ),
    ],
)
def test_invalid_requests_are_refused_with_the_reason(body: bytes, expected: str) -> None:
    assert refusal(body).startswith(expected)
    assert re.fullmatch(r"[^:]+: expected .+, got .+", refusal(body))


@pytest.mark.parametrize(
    ("size", "tail", "expected"),
    [
        (16, 15, "input hidden_states: expected 16 bytes after the JSON, got 15"),
        (16, 17, "binary_data_size of all inputs: expected a sum of 17, the bytes after the JSON, got 16"),
        (
            12,
            12,
            "binary_data_size of input hidden_states: expected 16 for shape [1, 4] of FP32, got 12",
        ),
        (-16, 16, "binary_data_size of input hidden_states: expected 16 for shape [1, 4] of FP32, got -16"),
        ("16", 16, "binary_data_size of input hidden_states: expected 16 for shape [1, 4] of FP32, got '16'"),
    ],
)
def test_wrong_byte_counts_are_refused(size: Any, tail: int, expected: str) -> None:
    header = request_body(BINARY_ROW | {"parameters": {"binary_data_size": size}})
    assert refusal(header + bytes(tail), len(header)) == expected


def test_wrong_header_lengths_and_a_part_of_a_row_are_refused() -> None:
    for length in (1, 10, 10**6):
        refusal(request_body(BINARY_ROW) + bytes(16), length)
    expected = "body: expected rows of 16 bytes (4 FP32 values), without a JSON header, got 24 bytes"
    assert refusal(bytes(24), 0) == expected


KNOWN = (
    *("id", "parameters", "inputs", "outputs", "name", "datatype", "shape", "data"),
    *("timeout", "priority", "binary_data_output", "binary_data_size", "binary_data"),
    *("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset"),
    *("sequence_id", "sequence_start", "sequence_end", "classification", "content_type"),
)
FULL = {
    "id": "a",
    "parameters": {"timeout": 7000, "priority": 3, "binary_data_output": True},
    "inputs": [BINARY_ROW, IDS | {"parameters": {}}, WEIGHTS],
    "outputs": [{"name": "hidden_states", "parameters": {"datatype": "BF16", "binary_data": False}}],
}
# As KServe's REST client sends it.
NO_ROWS = BINARY_ROW | {"shape": [0, 4], "data": None, "parameters": {"binary_data_size": 0}}


def objects_of(value: Any) -> Iterator[dict[str, Any]]:
    """Every object in a JSON value."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects_of(each)


def meaning_of(header: dict[str, Any], data: bytes) -> Any:
    """What a request asks for, or why it is refused."""
    text = json.dumps(header).encode()
    try:
        request = parse_request(text + data, len(text), SPEC)
    except OipError as error:
        return error.status, error.message, error.request_id
    layer = request.layer
    tensors = (layer.hidden_states, layer.topk_ids, layer.topk_weights)
    parts = [None if tensor is None else bytes(host_view(tensor)) for tensor in tensors]
    return replace(request, layer=LayerRequest(0, b"", "", None, "", None, "")), parts, layer.output_datatype


@pytest.mark.parametrize(
    ("header", "data"), [(FULL, bytes(16)), ({"inputs": [ONE_ROW]}, b""), ({"inputs": [NO_ROWS]}, b"")]
)
def test_null_is_absent_in_every_field(header: dict[str, Any], data: bytes) -> None:
    expected, filled = meaning_of(header, data), deepcopy(header)
    assert not isinstance(expected[0], int), expected
    for found in list(objects_of(filled)):
        found |= {name: None for name in KNOWN if name not in found}
    assert meaning_of(filled, data) == expected
    for index, found in enumerate(objects_of(header)):
        for name in found:
            without, nulled = deepcopy(header), deepcopy(header)
            del list(objects_of(without))[index][name]
            list(objects_of(nulled))[index][name] = None
            assert meaning_of(nulled, data) == meaning_of(without, data), (index, name)


def test_null_is_no_element_of_an_array() -> None:
    for field, wrong in (("data", [1, None, 3, 4]), ("data", [[1, 2, 3, None]]), ("shape", [None, 4])):
        assert "null" in refusal(request_body(ONE_ROW | {field: wrong}))
    for more in ({"inputs": [None]}, {"outputs": [None]}):
        text = refusal(json.dumps({"inputs": [ONE_ROW], **more}).encode())
        assert re.fullmatch(r"(in|out)puts: expected an array of objects, got \[null\]", text)


def test_errors_contain_the_request_id() -> None:
    with pytest.raises(OipError) as caught:
        parse_request(request_body(ONE_ROW | {"shape": [1, 5]}, id="\ud800 seven"), None, SPEC)
    assert caught.value.request_id == "\ud800 seven"
    assert json.loads(caught.value.body())["error"].endswith("(request id: \ud800 seven)")


def test_a_long_id_is_shortened_in_errors() -> None:
    with pytest.raises(OipError) as caught:
        parse_request(request_body(ONE_ROW | {"shape": [1, 5]}, id="seven" * 10_000), None, SPEC)
    assert re.fullmatch(
        r".* \(request id: (seven)+[seven]*\.\.\.\)", json.loads(caught.value.body())["error"]
    )
    assert len(caught.value.body()) < 400


@pytest.mark.parametrize(("mark", "limit"), [("{}", 1000), ("[]", 1000 + 3 * 8)])
def test_json_of_empty_objects_is_refused_before_it_is_parsed(mark: str, limit: int) -> None:
    def of(count: int) -> bytes:
        return f'{{"inputs":[{",".join([mark] * (count - 1))}]'.encode()  # never closed, so no JSON

    assert "invalid JSON" in refusal(of(limit))
    assert refusal(of(limit + 1)) == f"request: expected JSON with at most {limit} {mark[0]}, got {limit + 1}"


def test_arrays_that_are_nested_too_deeply_are_refused() -> None:
    text = refusal(b"[" * 100_000, None, replace(SPEC, max_request_tokens=40_000))
    assert text == "request: expected JSON, got arrays nested too deeply"


def test_nested_rows_of_the_largest_request_are_parsed() -> None:
    def entry(name: str, datatype: str, columns: int, values: list[float]) -> dict[str, object]:
        return {"name": name, "datatype": datatype, "shape": [8, columns], "data": [values] * 8}

    inputs = [
        entry("hidden_states", "FP32", 4, [0.5] * 4),
        entry("topk_ids", "INT32", 2, [0, 1]),
        entry("topk_weights", "FP32", 2, [0.5] * 2),
    ]
    assert parse_request(json.dumps({"inputs": inputs}).encode(), None, SPEC).layer.num_tokens == 8
