"""JSON has a limit of its own, for requests before they are parsed, and outputs before they are computed."""

import asyncio
import gzip
import json
import tracemalloc

import numpy as np
import pytest

from expertd.service.http.protocol import compress, decompress
from expertd.service.http.protocol.datatypes import bytes_to_numbers
from expertd.service.inference.errors import RequestError
from expertd.service.inference.limits import BodyLimit
from tests.service.apps import (
    HIDDEN,
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
from tests.service.sockets import INFER, connect, head, read_answer

LIMIT = 4000
TOO_LARGE = f"JSON: expected at most {LIMIT} bytes"
HINT = "; send tensors in binary, with Inference-Header-Content-Length"


def one_token(size: int) -> bytes:
    """A valid JSON request of `size` bytes, with a small answer."""
    values = {"name": "hidden_states", "datatype": "FP32", "shape": [1, HIDDEN], "data": [0.125] * HIDDEN}
    body = json.dumps({"inputs": [values], "parameters": {"binary_data_output": True}}).encode()
    return body + b" " * (size - len(body))


def post(*headers: str) -> bytes:
    return head(f"POST {INFER} HTTP/1.1", *headers)


LARGE, CHUNKED, HEADER = (
    "Content-Length: 900000",
    "Transfer-Encoding: chunked",
    "Inference-Header-Content-Length: ",
)
TOO_MUCH = [
    (post(f"Content-Length: {LIMIT + 1}"), 4001),
    (post(LARGE), 900_000),
    (post(LARGE, "Content-Encoding: gzip"), 900_000),
    (post(LARGE, f"{HEADER}{LIMIT + 1}"), 4001),
    (post("Content-Length: 9", "Content-Encoding: gzip", f"{HEADER}900000"), 900_000),
    (post(CHUNKED, f"{HEADER}4001"), 4001),
    (post(CHUNKED) + b"%x\r\n" % (LIMIT + 1), 4001),
    (post(CHUNKED) + b"%x\r\n%s\r\nfa1\r\n" % (LIMIT, bytes(LIMIT)), 8001),
]


async def test_too_much_json_is_refused_before_it_arrives() -> None:
    async with serving(tiny_settings({"max_json_bytes": LIMIT})) as server:
        for data, got in TOO_MUCH * 2:  # the second head is a known one
            with connect(server.port) as sock:
                sock.sendall(data)
                answer = await asyncio.to_thread(read_answer, sock)
            assert (answer.status, answer.error) == (413, f"{TOO_LARGE}, got at least {got}{HINT}")
        refusals = server.metric("refusals_total", model="tiny", reason="json_too_large")
        assert refusals == 2 * len(TOO_MUCH)


@pytest.mark.parametrize("encoding", [None, "gzip", "deflate"])
async def test_json_up_to_the_limit_is_parsed(encoding: str | None) -> None:
    def packed(body: bytes) -> bytes:
        return body if encoding is None else compress([body], encoding)

    headers = {"content_encoding": encoding or "identity"}
    async with serving(tiny_settings({"max_json_bytes": LIMIT})) as server:
        output_of(await server.infer(packed(one_token(LIMIT)), None, **headers))
        text = error_of(await server.infer(packed(one_token(LIMIT + 1)), None, **headers), 413)
        assert text == f"{TOO_LARGE}{' when decompressed' * bool(encoding)}, got at least {LIMIT + 1}{HINT}"
        assert server.metric("refusals_total", model="tiny", reason="json_too_large") == 1


async def test_tensors_in_binary_do_not_count_as_json() -> None:
    async with serving(tiny_settings({"max_json_bytes": LIMIT})) as server:
        body, length = hidden_request(rows(60))
        assert len(body) > 7 * LIMIT
        plain = output_of(await server.infer(body, length))
        packed = await server.infer(gzip.compress(body), length, content_encoding="gzip")
        np.testing.assert_array_equal(output_of(packed), plain)


async def test_a_header_that_is_longer_than_its_body_is_another_error() -> None:
    async with serving(tiny_settings({"max_json_bytes": LIMIT})) as server:
        text = error_of(await server.infer(b"{}", 2 * LIMIT), 400)
        assert text == "Inference-Header-Content-Length: expected at most the body's 2 bytes, got 8000"


@pytest.mark.parametrize("is_json", [True, False])
def test_a_bomb_is_stopped_while_it_is_inflated(is_json: bool) -> None:
    bomb = gzip.compress(bytes(100_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="when decompressed, got at least 100001"):
            decompress(bomb, "gzip", BodyLimit(100_000, is_json))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


async def test_a_large_output_as_json_is_refused_before_it_is_computed() -> None:
    runner = EchoRunner()
    limit = 5 * HIDDEN * 24
    async with serving(tiny_settings({"max_json_bytes": limit}), serving_runner(runner)) as server:
        tensor = {"hidden_states": ("FP32", [6, HIDDEN], rows(6).tobytes())}
        for _ in range(2):  # the second time the same JSON was parsed before
            text = error_of(await server.infer(*binary_request(tensor, id="a")), 413)
            assert text == (
                f"output hidden_states: expected at most {limit} bytes of JSON, got up to {6 * HIDDEN * 24} "
                f"for shape [6, {HIDDEN}]; set binary_data_output to get it in binary (request id: a)"
            )
        assert runner.steps == []
        assert server.metric("refusals_total", model="tiny", reason="json_too_large") == 2
        wanted = [{"name": "hidden_states", "parameters": {"binary_data": True}}]
        output_of(await server.infer(*binary_request(tensor, outputs=wanted)))
        five = {"hidden_states": ("FP32", [5, HIDDEN], rows(5).tobytes())}
        np.testing.assert_array_equal(output_of(await server.infer(*binary_request(five))), rows(5))


@pytest.mark.parametrize(("datatype", "exponent"), [("FP16", 0x7C00), ("BF16", 0x7F80), ("FP32", 0x7F800000)])
def test_no_number_takes_more_json_than_is_counted(datatype: str, exponent: int) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    if datatype == "FP32":
        bits = np.random.default_rng(0).integers(0, 2**32, 200_000).astype(np.uint32)
    finite = bits[(bits & exponent) != exponent]
    numbers = bytes_to_numbers(finite.tobytes(), datatype, "x")
    longest = max(len(json.dumps(number)) + len(",") for number in numbers)
    assert 20 < longest <= 24
