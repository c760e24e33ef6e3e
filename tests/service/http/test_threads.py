"""Large JSON has one thread, which leaves others half of the time, and does no work for callers who left."""

import asyncio
import gzip
import socket
import struct
import threading
import time
from itertools import pairwise
from typing import Any

import pytest

from expertd.service.engine.errors import QueueFullError, TooManyRequestsError
from expertd.service.http.connection import Connection
from expertd.service.http.infer_head import HttpHead
from expertd.service.inference.threads import Threads, Where
from expertd.service.settings.parts import Limits
from tests.service.apps import (
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
    await asyncio.wait_for(asyncio.gather(waiting, other), 10)


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
    connections: set[Connection] = set()
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
