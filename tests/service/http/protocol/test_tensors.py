"""Conversion between numbers and bytes, responses, and compression."""

import gzip
import json
import zlib
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.service.engine.spec import LayerSpec
from expertd.service.http.protocol import (
    OipError,
    accepts_gzip,
    build_response,
    compress,
    decompress,
    parse_request,
    requested_encoding,
)
from expertd.service.http.protocol.datatypes import bytes_to_numbers, numbers_to_bytes
from expertd.service.inference.errors import RequestError
from expertd.service.inference.limits import BodyLimit

SPEC = LayerSpec(name="m", hidden_size=4, top_k=2, datatype="FP32", max_request_tokens=8, max_json_bytes=1000)
ONE_ROW = {"name": "hidden_states", "shape": [1, 4], "datatype": "FP32", "data": [1, 2.5, -3, 0]}


def request_body(**more: Any) -> bytes:
    return json.dumps({"inputs": [ONE_ROW], **more}).encode()


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=4, max_size=4))
def test_bf16_is_rounded_to_nearest_even(numbers: list[float]) -> None:
    with np.errstate(over="ignore"):
        expected = np.array(numbers, np.float32).astype(ml_dtypes.bfloat16)
    if np.isfinite(expected.astype(np.float32)).all():
        data = numbers_to_bytes(numbers, [1, 4], "BF16", "x")
        assert data == expected.tobytes()
        assert bytes_to_numbers(data, "BF16", "x") == expected.astype(np.float32).tolist()
    else:
        with pytest.raises(OipError, match="x: expected numbers that fit BF16, got "):
            numbers_to_bytes(numbers, [1, 4], "BF16", "x")


def test_numbers_too_large_for_fp16_are_refused() -> None:
    assert numbers_to_bytes([65504.0], [1, 1], "FP16", "x") == np.array([65504], np.float16).tobytes()
    with pytest.raises(OipError, match=r"^x: expected numbers that fit FP16, got 70000\.0 at 0$"):
        numbers_to_bytes([70000.0], [1, 1], "FP16", "x")


def test_a_response_in_json_and_in_binary() -> None:
    output = np.array([1, 0.5, -2, 0], np.float32)
    request = parse_request(request_body(id="a"), None, SPEC)
    response = build_response(request, output.data.cast("B"), SPEC)
    assert response.header_length is None
    assert json.loads(b"".join(response.parts)) == {
        "model_name": "m",
        "model_version": "1",
        "id": "a",
        "outputs": [{"name": "hidden_states", "shape": [1, 4], "datatype": "FP32", "data": [1, 0.5, -2, 0]}],
    }
    request = parse_request(output.tobytes(), 0, SPEC)
    response = build_response(request, output.data.cast("B"), SPEC)
    header, data = map(bytes, response.parts)
    assert response.header_length == len(header)
    assert "id" not in json.loads(header)
    assert json.loads(header)["outputs"][0]["parameters"] == {"binary_data_size": 16}
    assert data == output.tobytes()


def test_json_output_is_refused_for_values_that_are_not_finite() -> None:
    request = parse_request(request_body(), None, SPEC)
    with pytest.raises(OipError, match=r"got 2 that are not finite \(the first at 1: nan\).*binary_data"):
        build_response(request, np.array([0, np.nan, 1, np.inf], np.float32).data.cast("B"), SPEC)


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_compression_round_trips(encoding: str) -> None:
    body = b"expert" * 100
    packed = compress([body[:10], memoryview(body)[10:]], encoding)
    assert len(packed) < len(body)
    assert (gzip.decompress(packed) if encoding == "gzip" else zlib.decompress(packed)) == body
    assert decompress(packed, encoding, BodyLimit(len(body))) == body
    with pytest.raises(RequestError, match="at most 599 bytes when decompressed") as caught:
        decompress(packed, encoding, BodyLimit(len(body) - 1))
    assert caught.value.reason == "body_too_large"
    after = "bytes after its end" if encoding == "deflate" else "expected gzip data"
    for broken, expected in (
        (b"", "a part of it"),
        (packed[:-1], "a part of it"),
        (packed + b"no gzip", after),
    ):
        with pytest.raises(OipError, match=expected):
            decompress(broken, encoding, BodyLimit(len(body)))


def test_gzip_may_have_several_members() -> None:
    parts = [b"expert" * 30_000, b"", bytes(range(256)) * 500, b"x"]
    packed = b"".join(map(gzip.compress, parts))
    whole = b"".join(parts)
    assert decompress(packed, "gzip", BodyLimit(len(whole))) == whole
    with pytest.raises(RequestError, match=f"at most {len(whole) - 1} bytes") as caught:
        decompress(packed, "gzip", BodyLimit(len(whole) - 1))
    assert caught.value.reason == "body_too_large"
    for broken in (packed[:-1], packed + packed[:5]):
        with pytest.raises(OipError, match="a part of it"):
            decompress(broken, "gzip", BodyLimit(2 * len(whole)))
    with pytest.raises(OipError, match="bytes after its end"):
        decompress(zlib.compress(b"x") * 2, "deflate", BodyLimit(2))


def test_the_number_of_gzip_members_is_limited() -> None:
    empty = gzip.compress(b"")
    assert decompress(empty * 4096, "gzip", BodyLimit(0)) == b""
    with pytest.raises(OipError, match="at most 4096 gzip members, got at least 4097") as caught:
        decompress(empty * 4097, "gzip", BodyLimit(0))
    assert caught.value.status == 400


def test_one_coding_or_none_is_undone() -> None:
    packed = gzip.compress(b"x")
    for identity in ("identity", "identity,", " Identity ,, identity"):
        body = bytearray(b"x")
        output = decompress(body, identity, BodyLimit(0))
        body[:] = b"y"  # another request's: its memory is given back
        assert output == b"x"
        assert decompress(packed, f"{identity}, X-GZip", BodyLimit(1)) == b"x"
    for several in ("gzip, gzip", "deflate,gzip", "gzip, br", "br", "", ","):
        with pytest.raises(OipError) as caught:
            decompress(gzip.compress(packed), several, BodyLimit(1000))
        text = f"Content-Encoding: expected gzip, deflate or identity, got {several!r}"
        assert (caught.value.status, caught.value.message) == (415, text)


def test_what_the_response_may_be_compressed_with() -> None:
    only_one = {"gzip": "gzip", " Deflate ": "deflate", "gzip, deflate, br": None, "": None, "identity": None}
    assert {header: requested_encoding(header) for header in only_one} == only_one
    accepted = ("gzip", "br, GZip ; q=0.5", "*", "gzip;q=0.001")
    refused = ("", "deflate", "gzip;q=0, *", "gzip; q=0.000", "*;q=0")
    assert all(accepts_gzip(header) for header in accepted)
    assert not any(accepts_gzip(header) for header in refused)


def test_others_can_run_while_much_json_is_written() -> None:
    values = np.random.default_rng(0).standard_normal((600, 4)).astype(np.float32)
    spec = replace(SPEC, max_request_tokens=600, max_json_bytes=1 << 20)
    data = {**ONE_ROW, "shape": [600, 4], "data": values.tolist()}
    request = parse_request(json.dumps({"inputs": [data]}).encode(), None, spec)
    pauses: list[None] = []
    response = build_response(request, values.data.cast("B"), spec, lambda: pauses.append(None))
    assert len(pauses) == 3
    assert json.loads(b"".join(response.parts))["outputs"][0]["data"] == values.ravel().tolist()
