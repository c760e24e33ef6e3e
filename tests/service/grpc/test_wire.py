"""Raw tensors are cut out of messages and put into them as a parser does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.service.grpc.messages import CLASSES
from expertd.service.grpc.wire import split_request, with_outputs

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
