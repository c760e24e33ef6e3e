"""Large JSON has one thread, which leaves others half of the time, and does no work for callers who left."""

import asyncio
import json
import socket
import struct
import threading
import time
from itertools import pairwise
from typing import Any

import pytest

from expertd.service.http import infer
from expertd.service.http.connection import Connection
from expertd.service.http.threads import Threads, Where
from tests.service.apps import json_input, json_request, rows, serving, serving_runner, tiny_settings
from tests.service.runners import EchoRunner
from tests.service.sockets import INFER, connect, head, listening
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


async def test_errors_reach_the_caller_and_the_thread_goes_on() -> None:
    threads, loop = Threads(), asyncio.get_running_loop()
    with pytest.raises(json.JSONDecodeError):
        await threads.run(Where.JSON_THREAD, loop, lambda: json.loads("{"))
    assert await threads.run(Where.JSON_THREAD, loop, lambda: json.loads("{}")) == {}


async def test_json_of_a_caller_that_left_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []
    connections: set[Connection] = set()
    monkeypatch.setattr(infer, "parse_body", lambda *arguments: parsed.append(arguments))
    body = json_request(json_input(rows(40)), id="x")
    assert len(body) > 64 * 1024
    async with (
        serving(tiny_settings(), serving_runner(EchoRunner())) as server,
        listening(server, connections=connections) as port,
    ):
        gate = threading.Event()
        loop, threads = asyncio.get_running_loop(), server.app.infer.threads
        holding = threads.run(Where.JSON_THREAD, loop, gate.wait)
        with connect(port) as sock:
            data = head(f"POST {INFER} HTTP/1.1", f"Content-Length: {len(body)}") + body
            await asyncio.to_thread(sock.sendall, data)
            arena = server.app.engine.arena
            assert arena is not None
            await until(lambda: arena.used_bytes > 0)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset at once
        await until(lambda: not connections)
        gate.set()
        await holding
        await until(lambda: server.metric("requests_total", model="tiny", status="499") == 1)
        assert parsed == []
