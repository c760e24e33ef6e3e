"""Messages as requests over HTTP: whatever arrives is translated or refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.service.grpc.infer_request import UntranslatedError, parts_of
from tests.service.apps import HIDDEN, rows
from tests.service.grpc.calls import hidden_message

GOOD = hidden_message(rows(1), request_id="7", timeout=5).SerializeToString()


def test_a_message_becomes_json_and_bytes() -> None:
    request = parts_of(GOOD, 1 << 20).translate()
    assert (request.model, request.version) == ("tiny", "1")
    assert json.loads(request.header) == {
        "id": "7",
        "parameters": {"timeout": 5, "binary_data_output": True},
        "inputs": [
            {
                "name": "hidden_states",
                "datatype": "FP32",
                "shape": [1, HIDDEN],
                "parameters": {"binary_data_size": 4 * HIDDEN},
            }
        ],
        "outputs": [],
    }
    assert [bytes(tensor) for tensor in request.tensors] == [rows(1).tobytes()]


def test_messages_that_differ_in_their_tensors_are_read_once() -> None:
    first, second = (
        parts_of(hidden_message(rows(2, seed)).SerializeToString(), 1 << 20).translate() for seed in (1, 2)
    )
    assert first.header is second.header
    assert bytes(first.tensors[0]) != bytes(second.tensors[0])


def test_errors_are_short_whatever_the_names() -> None:
    message = hidden_message(rows(1))
    message.inputs[0].name = "a" * 100_000
    message.inputs[0].shape[0] = 2
    with pytest.raises(UntranslatedError) as caught:
        parts_of(message.SerializeToString(), 1 << 20).translate()
    assert len(str(caught.value)) < 300


@given(st.binary(max_size=200), st.integers(0, len(GOOD)), st.integers(0, 40))
def test_nothing_else_is_raised(piece: bytes, start: int, cut: int) -> None:
    for data in (piece, GOOD[:start] + piece + GOOD[start + cut :]):
        try:
            request = parts_of(data, 1 << 20).translate()
        except UntranslatedError:
            continue
        json.loads(request.header)
