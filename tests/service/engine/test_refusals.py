"""Requests without output are counted by reason, and each is one line in the log."""

import asyncio
import gzip
import logging
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import pytest

from expertd.service.engine.refusals import REASONS
from expertd.service.engine.request_counts import STATUSES
from tests.service.apps import (
    HIDDEN,
    Serving,
    error_of,
    hidden_request,
    output_of,
    rows,
    serving,
    serving_runner,
    tiny_settings,
)
from tests.service.runners import EchoRunner
from tests.service.waiting import until

LOGGER = "expertd.service.http.infer_ending"
GOOD = hidden_request(rows(3))
POISON = 666.0


def refusals(server: Serving) -> dict[str, float]:
    """reason -> refused requests for the model "tiny", without zeros."""
    counts = {reason: server.metric("refusals_total", model="tiny", reason=reason) for reason in REASONS}
    return {reason: count for reason, count in counts.items() if count}


def all_refused(server: Serving) -> float:
    """Requests to the model "tiny" that were not counted as 200."""
    counts = (server.metric("requests_total", model="tiny", status=str(s)) for s in STATUSES if s != 200)
    return sum(counts)


@pytest.mark.parametrize(
    ("body", "header_length", "headers", "status", "reason"),
    [
        (b"{", None, {}, 400, "invalid_request"),
        (*GOOD, {"content_encoding": "br"}, 415, "unsupported_encoding"),
        (bytes(200_000), 0, {}, 413, "body_too_large"),
        (gzip.compress(bytes(200_000)), 0, {"content_encoding": "gzip"}, 413, "body_too_large"),
        (bytes(5000), None, {}, 413, "json_too_large"),
        (*hidden_request(rows(65)), {}, 400, "too_many_tokens"),
        (*hidden_request(np.full((1, HIDDEN), POISON, np.float32)), {}, 500, "step_failed"),
    ],
)
async def test_a_refusal_is_counted_by_its_reason(
    body: bytes, header_length: int | None, headers: dict[str, str], status: int, reason: str
) -> None:
    limits = {"max_body_bytes": 100_000, "max_json_bytes": 2000}
    async with serving(tiny_settings(limits), serving_runner(EchoRunner(POISON))) as server:
        output_of(await server.infer(*GOOD))
        assert refusals(server) == {}
        error_of(await server.infer(body, header_length, **headers), status)
        assert refusals(server) == {reason: 1}
        assert all_refused(server) == 1


async def test_an_internal_error_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(EchoRunner):
        def validate(self, request: Any) -> None:
            raise ZeroDivisionError

    ids = {"name": "topk_ids", "datatype": "INT32", "shape": [0, 2], "data": []}
    weights = {"name": "topk_weights", "datatype": "FP32", "shape": [0, 2], "data": []}
    states = {"name": "hidden_states", "datatype": "FP32", "shape": [0, HIDDEN], "data": []}
    async with serving(tiny_settings(), serving_runner(Broken())) as server:
        body = {"id": "b", "inputs": [ids, weights, states]}
        text = error_of(await server.http.post("/v2/models/tiny/infer", json=body), 500)
        assert text == "internal server error: see the server's log (request id: b)"
        assert refusals(server) == {"internal_error": 1}
    assert "ZeroDivisionError" in caplog.text


async def test_refusals_while_busy_and_while_shutting_down() -> None:
    runner = EchoRunner()
    async with serving(tiny_settings({"max_queue_requests": 1}), serving_runner(runner)) as server:
        runner.gate.clear()
        first = asyncio.ensure_future(server.infer(*GOOD))
        assert await asyncio.to_thread(runner.entered.acquire, True, 10)
        error_of(await server.infer(*hidden_request(rows(1), parameters={"timeout": 1})), 503)
        assert refusals(server) == {"queue_timeout": 1}
        second = asyncio.ensure_future(server.infer(*GOOD))
        await until(lambda: server.metric("queue_requests", model="tiny") > 0)
        error_of(await server.infer(*GOOD), 503)
        assert refusals(server) == {"queue_timeout": 1, "queue_full": 1}
        runner.gate.set()
        output_of(await first)
        output_of(await second)
        await server.app.engine.drain()
        error_of(await server.infer(*GOOD), 503)
        assert refusals(server) == {"queue_timeout": 1, "queue_full": 1, "shutting_down": 1}
        assert all_refused(server) == 3


async def test_an_incomplete_body_is_counted_by_the_reason_it_was_refused() -> None:
    async with serving(tiny_settings({"body_timeout_seconds": 0.01})) as server:
        caller = Caller(None)
        await server.app(caller.scope, caller.receive, caller.send)
        assert refusals(server) == {"body_timeout": 1}
        server.app.stop_reading()
        await server.app(caller.scope, caller.receive, caller.send)
        assert refusals(server) == {"body_timeout": 1, "shutting_down": 1}
        assert [m["status"] for m in caller.sent if "status" in m] == [408, 503]


class Caller:
    """A caller that sends `body` (None: nothing) and disconnects when `gone` is set."""

    def __init__(self, body: bytes | None) -> None:
        self.gone = asyncio.Event()
        self.watched = asyncio.Event()
        self.sent: list[MutableMapping[str, Any]] = []
        self._bodies = [] if body is None else [body]
        self.scope = {
            "type": "http",
            "method": "POST",
            "path": "/v2/models/tiny/infer",
            "headers": [(b"inference-header-content-length", str(GOOD[1]).encode())],
        }

    async def receive(self) -> MutableMapping[str, Any]:
        if self._bodies:
            return {"type": "http.request", "body": self._bodies.pop(), "more_body": False}
        self.watched.set()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("watched", [False, True])
async def test_a_caller_that_disconnects_during_its_step_is_not_counted_as_answered(watched: bool) -> None:
    runner = EchoRunner()
    async with serving(tiny_settings(), serving_runner(runner)) as server:
        runner.gate.clear()
        caller = Caller(GOOD[0])
        leaving = asyncio.ensure_future(server.app(caller.scope, caller.receive, caller.send))
        assert await asyncio.to_thread(runner.entered.acquire, True, 10)
        if watched:  # only longer waits are watched
            await asyncio.wait_for(caller.watched.wait(), 10)
        caller.gone.set()
        runner.gate.set()
        await asyncio.wait_for(leaving, 10)
        assert caller.sent == []
        assert server.metric("requests_total", model="tiny", status="200") == 0
        assert server.metric("requests_total", model="tiny", status="499") == 1
        assert refusals(server) == {"client_gone": 1}


async def test_a_caller_that_stays_connected_is_answered() -> None:
    async with serving(tiny_settings(), serving_runner(EchoRunner())) as server:
        caller = Caller(GOOD[0])
        await server.app(caller.scope, caller.receive, caller.send)
        assert caller.sent[0]["status"] == 200
        assert refusals(server) == {}


async def test_each_refusal_is_one_line_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER)
    async with serving(tiny_settings()) as server:
        output_of(await server.infer(*GOOD))
        error_of(await server.infer(*hidden_request(rows(65), id="a\nb")), 400)
        error_of(await server.http.post("/v2/models/x%0Ay/infer"), 404)
    lines = [record.getMessage() for record in caplog.records if record.name == LOGGER]
    assert lines == [
        r"400 too_many_tokens: model 'tiny', id 'a\nb': request: expected at most 64 tokens, got 65",
        r"404 unknown_model: model 'x\ny', id null: model: expected tiny, got 'x\ny'",
    ]
