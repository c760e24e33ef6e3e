"""Messages as infer requests: whatever arrives is the request that it is over HTTP, or is refused."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.service.engine.spec import LayerSpec
from expertd.service.grpc.infer_request import MessageHead, own_id, split
from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.wire import split_request, with_outputs
from expertd.service.http.protocol import parse_request
from expertd.service.inference.body import Received
from expertd.service.inference.errors import RequestError
from expertd.service.inference.regions import no_regions
from expertd.service.memory import host_view
from expertd.service.moe.request import LayerRequest
from expertd.service.settings.parts import Limits
from tests.service.apps import HIDDEN, rows
from tests.service.grpc.calls import hidden_message

SPEC = LayerSpec("tiny", HIDDEN, top_k=2, datatype="FP32", max_request_tokens=64, max_json_bytes=1 << 20)
GOOD = hidden_message(rows(1), request_id="7", timeout=5).SerializeToString()


def head_of(data: bytes) -> tuple[MessageHead, Received]:
    rest, tensors = split(data)
    head = MessageHead(rest, tuple(map(len, tensors)), ())
    head.read(Limits())
    return head, Received(b"".join(tensors), None)


def values(layer: LayerRequest) -> list[object]:
    tensors = (layer.hidden_states, layer.topk_ids, layer.topk_weights)
    content = [None if tensor is None else bytes(host_view(tensor)) for tensor in tensors]
    return [*content, layer.num_tokens, layer.datatype, layer.topk_ids_datatype, layer.output_datatype]


@pytest.mark.parametrize("typed", [False, True])
def test_a_message_is_the_request_that_it_is_over_http(typed: bool) -> None:
    rng = np.random.default_rng()
    inputs: dict[str, tuple[str, str, Any]] = {
        "topk_ids": ("INT64", "int64_contents", rng.integers(0, 4, (3, 2))),
        "hidden_states": ("FP32", "fp32_contents", rng.random((3, HIDDEN), np.float32)),
        "topk_weights": ("FP32", "fp32_contents", rng.random((3, 2), np.float32)),
    }
    message = hidden_message(rows(0), request_id="7", timeout=5, priority=9)
    del message.inputs[:], message.raw_input_contents[:]
    message.outputs.add(name="hidden_states").parameters["datatype"].string_param = "FP16"
    entries: list[dict[str, Any]] = []
    for name, (datatype, field, array) in inputs.items():
        entry = message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        if typed:
            getattr(entry.contents, field).extend(array.ravel().tolist())
        else:
            message.raw_input_contents.append(array.tobytes())
        entries.append({"name": name, "datatype": datatype, "shape": list(array.shape)})
        entries[-1]["parameters"] = {"binary_data_size": array.nbytes}
    outputs = [{"name": "hidden_states", "parameters": {"datatype": "FP16", "binary_data": True}}]
    parameters = {"timeout": 5, "priority": 9}
    text = json.dumps({"id": "7", "inputs": entries, "outputs": outputs, "parameters": parameters}).encode()
    binary = b"".join(array.tobytes() for _, _, array in inputs.values())
    expected = parse_request(text + binary, len(text), SPEC)
    head, received = head_of(message.SerializeToString())
    plan = head.parse(received, SPEC, None, no_regions)
    assert (head.model, head.version, head.request_id, plan.request.id) == ("tiny", "1", "7", "7")
    assert values(plan.layer(received.content, None)) == values(expected.layer)
    for name in ("binary_output", "timeout_seconds", "priority"):
        assert getattr(plan.request, name) == getattr(expected, name)


def test_messages_that_differ_in_their_tensors_are_read_once() -> None:
    head, received = head_of(GOOD)
    assert head.find(received.content) is None
    plan = head.parse(received, SPEC, None, no_regions)
    other = rows(1, 2).tobytes()
    assert head.find(other) is plan
    assert bytes(host_view(plan.layer(other, None).hidden_states)) == other
    typed = hidden_message(rows(1))
    del typed.raw_input_contents[:]
    typed.inputs[0].contents.fp32_contents.extend(rows(1).ravel().tolist())
    head, received = head_of(typed.SerializeToString())
    head.parse(received, SPEC, None, no_regions)
    assert head.find(received.content) is None, "its tensors are in the head"


def test_errors_are_short_whatever_the_names() -> None:
    message = hidden_message(rows(1), model="a" * 100_000)
    message.inputs[0].name = "a" * 100_000
    message.inputs[0].shape[0] = 2
    head, received = head_of(message.SerializeToString())
    with pytest.raises(RequestError) as caught:
        head.parse(received, SPEC, None, no_regions)
    assert len(str(caught.value)) < 300


@given(st.binary(max_size=200), st.integers(0, len(GOOD)), st.integers(0, 40))
def test_nothing_else_is_raised(piece: bytes, start: int, cut: int) -> None:
    for data in (piece, GOOD[:start] + piece + GOOD[start + cut :]):
        own_id(data)
        try:
            head, received = head_of(data)
            head.parse(received, SPEC, None, no_regions)
        except RequestError:
            continue


Request, Response = CLASSES["ModelInferRequest"], CLASSES["ModelInferResponse"]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16383, 16384, 300_000])
def test_a_request_is_split(size: int) -> None:
    message = Request(model_name="m", id="7")
    message.inputs.add(name="a", shape=[1, -1])
    message.parameters["timeout"].int64_param = -1
    message.raw_input_contents.extend([b"x" * size, b"", b"yz"])
    rest, raw = split_request(message.SerializeToString())
    assert [bytes(each) for each in raw] == [b"x" * size, b"", b"yz"]
    del message.raw_input_contents[:]
    assert Request.FromString(rest) == message


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300_000])
def test_outputs_are_appended(size: int) -> None:
    message = Response(model_name="m")
    read = Response.FromString(with_outputs(message.SerializeToString(), [b"x" * size, memoryview(b"y")]))
    assert list(read.raw_output_contents) == [b"x" * size, b"y"]
    assert read.model_name == "m"


def test_fields_of_other_types_stay() -> None:
    unknown = b"\x79" + bytes(8) + b"\x7d" + bytes(4) + b"\x70\xff\x01"
    rest, raw = split_request(unknown + b"\x3a\x01a")
    assert (rest, [bytes(each) for each in raw]) == (unknown, [b"a"])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x3a\x05abc", "cut off"),
        (b"\x3a", "cut off"),
        (b"\x79\x00", "cut off"),
        (b"\x0b", "wire type 3"),
        (b"\xff" * 11, "more than 10 bytes"),
        (b"\x40\x00" * 1025, "at least 1025 fields, expected at most 1024"),
        (b"\x3a\x00" * 1025, "at least 1025 fields, expected at most 1024"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        split_request(data)


@given(st.binary(max_size=64))
def test_nothing_else_is_raised_and_nothing_is_lost(data: bytes) -> None:
    try:
        rest, raw = split_request(data)
    except ValueError:
        return
    assert len(rest) + sum(map(len, raw)) <= len(data)
    assert bool(raw) == (rest != data)
