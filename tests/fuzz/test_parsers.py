"""Every parser answers or refuses, whatever it gets: no other exception, no status of 500, no hang."""

import json
import random
import zlib

import pytest

from expertd.service.engine.spec import LayerSpec
from expertd.service.grpc.infer_request import MessageHead, split
from expertd.service.http.framing import ChunkedBody
from expertd.service.http.protocol import OipError, decompress, oip_error, parse_request
from expertd.service.http.request_head import HeadParser, Heads
from expertd.service.http.responses import RefusedError
from expertd.service.inference.body import Received
from expertd.service.inference.errors import RequestError
from expertd.service.inference.limits import BodyLimit
from expertd.service.inference.regions import no_regions
from expertd.service.memory import host_view
from expertd.service.settings.parts import Limits
from tests.fuzz.mutations import cases

pytestmark = pytest.mark.slow

SPEC = LayerSpec(name="m", hidden_size=4, top_k=2, datatype="FP32", max_request_tokens=8, max_json_bytes=1000)
JSON = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"null",
    b"-1",
    b"1e999",
    b"NaN",
    b"\\ud800",
    b'"BF16"',
    b'"data"',
]
HTTP = [b"\r\n", b"\n", b" ", b":", b"\t", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 4\r\n"]
HTTP += [b"HTTP/1.1", b"HTTP/1.0", b"%2f", b"?", b"Host: y\r\n", b"\x00", b"Expect: 100-continue\r\n"]


def check(status: int, data: bytes) -> int:
    """The status of a refusal, which blames the caller."""
    assert 400 <= status < 500 or status in (501, 505), data
    return status


def check_text(error: OipError) -> None:
    assert len(json.loads(error.body())["error"]) < 1000


def test_bodies() -> None:
    for data in cases("bodies", JSON):
        length, body = int.from_bytes(data[:2], "little"), data[2:]
        for header_length in (None, length % (len(body) + 2)):
            try:
                request = parse_request(body, header_length, SPEC)
            except OipError as error:
                check(error.status, data)
                check_text(error)
            else:
                layer = request.layer
                sizes = {"FP32": 4, "FP16": 2, "BF16": 2}
                expected = layer.num_tokens * SPEC.hidden_size * sizes[layer.datatype]
                assert len(host_view(layer.hidden_states)) == expected


def test_compressed_bodies() -> None:
    limit = BodyLimit(10_000)
    for data in cases("bodies", JSON):
        for encoding, packed in (("deflate", zlib.compress(data)), ("gzip", data), ("deflate", data)):
            try:
                assert len(decompress(packed, encoding, limit)) <= limit.num_bytes
            except RequestError as error:
                check(oip_error(error).status, data)


def test_heads() -> None:
    heads, chance = Heads(Limits()), random.Random(0)
    for data in cases("heads", HTTP):
        whole = _outcome(heads, data)
        end = data.find(b"\r\n\r\n") + 4
        if end > 3:  # a head that arrives in pieces means the same
            parser, cut = HeadParser(Limits()), chance.randrange(end)
            try:
                found = parser.feed(data[:cut]) or parser.feed(data[cut:end])
            except RefusedError:
                found = None
            if found is not None:
                assert (found.method, found.raw_path, found.headers) == _outcome(heads, data[:end])
        if isinstance(whole, tuple):
            lengths = [value for name, value in whole[2] if name == b"content-length"]
            coded = [value for name, value in whole[2] if name == b"transfer-encoding"]
            assert not (lengths and coded), "smuggled"
            assert len(lengths) <= 1
            assert sum(name == b"host" for name, _ in whole[2]) <= 1


def _outcome(heads: Heads, data: bytes) -> object:
    try:
        head = heads.parse(data)
    except RefusedError as error:
        return check(error.status, data)
    return head.method, head.raw_path, head.headers


def test_chunks() -> None:
    chance = random.Random(0)
    for data in cases("chunks", [b"\r\n", b"0\r\n\r\n", b";", b"ffffffffffffffff", b"-1", b"0x2", b" "]):
        assert _fed(data, [len(data)]) == _fed(
            data, sorted(chance.randrange(len(data) + 1) for _ in range(3))
        )


def _fed(data: bytes, cuts: list[int]) -> object:
    """What a body is whose input arrives in these pieces; a status if it is refused."""
    got = bytearray()
    body, start, used = ChunkedBody(got.extend, 1000), 0, 0
    try:
        for cut in [*cuts, len(data)]:
            position, piece = 0, data[start:cut]
            while position < len(piece) and not body.done:
                moved = body.feed(piece, position)
                assert moved > position, "a hang"
                position = moved
            used, start = used + position, cut
    except RefusedError as error:
        return check(error.status, data)
    return bytes(got), body.done, used


def test_messages() -> None:
    for data in cases(
        "messages", [b"\x3a\x00", b"\x0a", b"\x2a", b"\xff\xff\xff\xff\x0f", b"FP32", b"\x08\x01"]
    ):
        try:
            rest, tensors = split(data)
            head = MessageHead(rest, tuple(map(len, tensors)), ())
            head.read(Limits())
            head.parse(Received(b"".join(tensors), None), SPEC, None, no_regions)
        except RequestError as error:
            check(oip_error(error).status, data)
