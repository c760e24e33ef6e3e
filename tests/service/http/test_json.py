"""JSON has a limit and a thread of its own: a line, a rest after each, and no work for callers who left."""

import asyncio
import gzip
import json
import socket
import struct
import threading
import time
import tracemalloc
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from expertd.service.engine.errors import QueueFullError, TooManyRequestsError
from expertd.service.http.connection import HttpConnection
from expertd.service.http.infer_head import HttpHead
from expertd.service.http.protocol import compress, decompress
from expertd.service.http.protocol.datatypes import bytes_to_numbers
from expertd.service.inference.errors import RequestError
from expertd.service.inference.limits import BodyLimit
from expertd.service.inference.threads import Threads, Where
from expertd.service.settings.parts import Limits
from tests.service.apps import (
    HIDDEN,
    binary_request,
    error_of,
    hidden_request,
    json_input,
    json_request,
    output_of,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.runners import EchoRunner
from tests.service.sockets import INFER, connect, head, read_answer
from tests.service.waiting import until

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


BUSY_SECONDS = 0.02


def busy() -> tuple[float, float]:
    """Use the interpreter for a while; returns when that began and ended."""
    began, end = time.perf_counter(), time.thread_time() + BUSY_SECONDS
    while time.thread_time() < end:
        pass
    return began, time.perf_counter()


async def test_json_is_done_one_by_one_with_a_rest_after_each() -> None:
    threads, loop = Threads(), asyncio.get_running_loop()
    spans = await asyncio.gather(*(threads.run(Where.JSON_THREAD, loop, busy) for _ in range(3)))
    for (_, ended), (began, _) in pairwise(spans):
        assert began - ended >= 0.9 * BUSY_SECONDS


async def test_other_work_does_not_wait_for_json() -> None:
    threads, loop = Threads(), asyncio.get_running_loop()
    gate = threading.Event()
    waiting = threads.run(Where.JSON_THREAD, loop, gate.wait)
    other = threads.run(Where.ANY_THREAD, loop, gate.set)
    await asyncio.wait_for(asyncio.gather(waiting, other), 60)


@pytest.mark.parametrize("status", [429, 503])
async def test_the_line_for_json_has_a_limit_and_room_for_each_other_key(status: int) -> None:
    limits = Limits.model_validate({"max_queue_json": 2, "queue_full_status": status})
    threads, loop, gate = Threads(), asyncio.get_running_loop(), threading.Event()
    await threads.run(Where.JSON_THREAD, loop, busy)
    for _ in range(100):  # answers are not limited, but those who wait for them come first
        answers = threads.run(Where.JSON_THREAD, loop, gate.wait)
    waiting = [threads.parse(loop, gate.wait, limits, caller) for caller in (1, 1, 2, 3)]
    for caller in (0, 1, 2):
        with pytest.raises(
            QueueFullError, match="the line for JSON is full: 4 requests of at most 2"
        ) as full:
            threads.check_json(limits, caller)
        assert isinstance(full.value, TooManyRequestsError) == (status == 429)
        assert full.value.retry_after in (5, 6), "104 times 20 ms, and rests as long"
        with pytest.raises(QueueFullError):
            threads.parse(loop, gate.wait, limits, caller)
    gate.set()
    await asyncio.gather(answers, *waiting)
    threads.check_json(limits, 0)
    await threads.parse(loop, gate.wait, limits, 0)


@pytest.mark.parametrize("is_packed", [False, True])
async def test_a_full_line_is_known_from_the_headers(is_packed: bool) -> None:
    body = json_request(json_input(rows(40)))
    more = []
    if is_packed:
        body, more = gzip.compress(body), ["Content-Encoding: gzip"]
    async with serving(tiny_settings({"max_queue_json": 1}), serving_runner(EchoRunner())) as server:
        gate = threading.Event()
        loop, threads = asyncio.get_running_loop(), server.app.infer.threads
        holding = threads.parse(loop, gate.wait, Limits(), 0)
        for fields, sent in ((f"Content-Length: {len(body)}", b""), ("Transfer-Encoding: chunked", body)):
            data = head(f"POST {INFER} HTTP/1.1", fields, *more)
            if sent:  # nothing is known of its size before it is there
                data += b"%x\r\n%b\r\n0\r\n\r\n" % (len(sent), sent)
            with connect(server.port) as sock:
                await asyncio.to_thread(sock.sendall, data)
                answer = await asyncio.to_thread(read_answer, sock)
            assert answer.status == 503, answer
            assert answer.error.startswith("the line for JSON is full: 1 requests of at most 1 wait")
        small = json_request(json_input(rows(1)))
        answered = await server.infer(small, None)
        assert answered.status_code == 200, "it is parsed at once"
        gate.set()
        await holding
        assert server.metric("refusals_total", model="tiny", reason="queue_full") == 2
        output_of(await server.infer(body, None, content_encoding="gzip" if is_packed else "identity"))


async def test_json_of_a_caller_that_left_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []
    connections: set[HttpConnection] = set()
    monkeypatch.setattr(HttpHead, "parse", lambda *arguments: parsed.append(arguments))
    body = json_request(json_input(rows(40)), id="x")
    assert len(body) > 64 * 1024
    async with serving(tiny_settings(), serving_runner(EchoRunner()), connections=connections) as server:
        gate = threading.Event()
        loop, threads = asyncio.get_running_loop(), server.app.infer.threads
        holding = threads.run(Where.JSON_THREAD, loop, gate.wait)
        with connect(server.port) as sock:
            data = head(f"POST {INFER} HTTP/1.1", f"Content-Length: {len(body)}") + body
            await asyncio.to_thread(sock.sendall, data)
            arena = server.arena
            await until(lambda: arena.used_bytes > 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset at once
        await until(lambda: not connections)
        gate.set()
        await holding
        await until(lambda: server.counted(499) == 1)
        assert parsed == []
