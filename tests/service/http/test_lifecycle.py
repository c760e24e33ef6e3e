"""Loading, a full queue, timeouts and draining, over HTTP."""

import asyncio
import threading
import time

import numpy as np
import pytest

from expertd.service.engine.layers import Cancelled, LoadCancelledError
from expertd.service.engine.loading import LoadedLayers
from expertd.service.http.app import ExpertApp
from expertd.service.http.connection import HttpConnection
from expertd.service.settings.model import Settings
from tests.service.apps import (
    HIDDEN,
    error_of,
    hidden_request,
    output_of,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.runners import EchoRunner
from tests.service.sockets import INFER, ask, connect, head, infer, read_to_end
from tests.service.waiting import until

GOOD = hidden_request(rows(3))


@pytest.mark.parametrize("status", [503, 429])
async def test_a_full_queue_answers_with_retry_after(status: int) -> None:
    runner = EchoRunner()
    settings = tiny_settings(limits={"max_queue_requests": 2, "queue_full_status": status})
    async with serving(settings, serving_runner(runner)) as server:
        runner.gate.clear()
        first = asyncio.ensure_future(server.infer(*GOOD))
        await runner.begun()
        waiting = [asyncio.ensure_future(server.infer(*GOOD)) for _ in range(2)]
        await until(lambda: server.app.engine.executor.waiting("tiny")[0] >= 2)
        refused = await server.infer(*GOOD)
        assert "the queue of model tiny is full" in error_of(refused, status)
        assert server.metric("refusals_total", model="tiny", reason="queue_full") == 1
        assert int(refused.headers["retry-after"]) >= 1
        assert server.metric("queue_requests", model="tiny") == 2
        assert server.metric("queue_tokens", model="tiny") == 6
        runner.gate.set()
        for response in await asyncio.gather(first, *waiting):
            output_of(response)
        output_of(await server.infer(*GOOD))


async def test_a_request_waits_no_longer_than_its_timeout() -> None:
    runner = EchoRunner()
    async with serving(tiny_settings(), serving_runner(runner)) as server:
        runner.gate.clear()
        first = asyncio.ensure_future(server.infer(*GOOD))
        await runner.begun()
        body, length = hidden_request(rows(1), parameters={"timeout": 20_000}, id="t")
        text = error_of(await server.infer(body, length), 503)
        assert text == "the request's timeout of 20000 microseconds expired in the queue (request id: t)"
        runner.gate.set()
        output_of(await first)
    assert runner.steps == [[3]], "the request that timed out was never computed"


async def test_not_ready_while_every_step_fails_and_ready_again_afterwards() -> None:
    runner = EchoRunner(poison=0.0)  # what a health check sends
    zeros = hidden_request(np.zeros((1, HIDDEN), np.float32))
    async with serving(tiny_settings(), serving_runner(runner)) as server:
        for count in (4, 5):  # the first ones are followed by one that does not fail
            for _ in range(count):
                assert (await server.http.get("/v2/health/ready")).status_code == 200
                error_of(await server.infer(*zeros), 500)
            if count == 4:
                output_of(await server.infer(*GOOD))
        assert server.metric("model_ready", model="tiny") == 0
        index = (await server.http.post("/v2/repository/index")).json()
        reason = "model tiny: at least the last 5 steps failed"
        assert (index[0]["state"], index[0]["reason"]) == ("UNAVAILABLE", reason)
        assert len(runner.steps) == 10
        for path in ("/v2/health/ready", "/v2/models/tiny/ready"):
            assert "steps failed" in error_of(await server.http.get(path), 503)
        runner.poison = None
        async with asyncio.timeout(60):  # each check has a step tried
            while (await server.http.get("/v2/health/ready")).status_code != 200:
                pass
        assert server.metric("model_ready", model="tiny") == 1
        output_of(await server.infer(*zeros))


async def test_not_ready_while_loading_and_after_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def failing(_: Settings, cancelled: Cancelled) -> LoadedLayers:
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(60)
        raise ValueError("no such weights")

    async with serving(tiny_settings(), failing, wait=False) as server:
        http = server.http

        async def check(phase: str, state: str) -> None:
            assert (await http.get("/v2/health/live")).status_code == 200
            for path in ("/v2/health/ready", "/v2/models/tiny/ready"):
                assert error_of(await http.get(path), 503) == f"the server is {phase}"
            assert phase in error_of(await server.infer(*GOOD), 503)
            assert phase in error_of(await http.get("/v1/partitions"), 503)
            index = (await http.post("/v2/repository/index")).json()
            assert index == [
                {"name": "tiny", "version": "1", "state": state, "reason": f"the server is {phase}"}
            ]
            assert (await http.post("/v2/repository/index", content=b'{"ready": true}')).json() == []

        await check("loading", "LOADING")
        release.set()
        await server.app.engine.wait_loaded()
        await check("failed", "UNAVAILABLE")
        assert server.metric("refusals_total", model="tiny", reason="not_ready") == 2
    assert "loading failed: no such weights" in caplog.text


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_refusal_while_draining_ends_the_connection_whatever_is_unread(chunked: bool) -> None:
    size = 300_000
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    request = head(f"POST {INFER} HTTP/1.1", framing)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (size, bytes(size)) if chunked else bytes(size)
    async with serving(tiny_settings()) as server:
        assert await server.app.engine.drain()
        (answer,) = await asyncio.to_thread(ask, server.port, request + body[:1000])
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        small = head(f"POST {INFER} HTTP/1.1", framing.replace(str(size), "4"))
        small += b"4\r\nfour\r\n0\r\n\r\n" if chunked else b"four"
        answers = await asyncio.to_thread(ask, server.port, small + request + body[:1000])
        assert [answer.status for answer in answers] == [503, 503], "the first one has another behind it"
        assert [answer.headers.get("connection") for answer in answers] == [None, "close"]


async def test_a_request_that_the_socket_holds_when_the_server_ends_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("expertd.service.http.connection._LAST_INPUT_SECONDS", 0.5)  # this client may be late
    connections: set[HttpConnection] = set()
    async with serving(tiny_settings(), connections=connections) as server:
        request, control = infer(*GOOD), head("PUT /v1/partitions HTTP/1.1", "Content-Length: 2") + b"{"
        server.app.stop_reading()
        for sent, later, statuses in (
            (request, b"", [200]),
            (request[:20], request[20:], [200]),
            (request[:20], b"", []),
            (control, b"", [503]),
            (b"", b"", []),
        ):
            with connect(server.port) as sock:
                await until(lambda: len(connections) == 1)
                sock.sendall(sent)  # the event loop has no iteration in which it could read it
                for connection in connections:
                    connection.shutdown()
                await asyncio.sleep(0.01)
                sock.sendall(later)
                got = await asyncio.to_thread(read_to_end, sock)
            assert [answer.status for answer in got] == statuses
            await until(lambda: not connections)


async def test_stopping_during_loading_cancels_it(caplog: pytest.LogCaptureFixture) -> None:
    started = threading.Event()

    def endless(_: Settings, cancelled: Cancelled) -> LoadedLayers:
        started.set()
        while not cancelled():
            time.sleep(0.001)
        raise LoadCancelledError

    app = ExpertApp(tiny_settings(), endless)
    async with app.router.lifespan_context(app):
        assert await asyncio.to_thread(started.wait, 60)
    assert "failed" not in caplog.text
    assert "still busy" not in caplog.text
