"""Requests without output are counted by reason, and each is one line in the log."""

import asyncio
import gzip
import logging
from collections import Counter
from typing import Any

import numpy as np
import pytest

from expertd.service.engine.refusals import REASONS
from expertd.service.http.connection import HttpConnection
from expertd.service.statuses import STATUSES
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
from tests.service.sockets import INFER, connect, head, read_to_end
from tests.service.waiting import until

LOGGER = "expertd.service.inference.admission"
GOOD = hidden_request(rows(3))
POISON = 666.0


def refusals(server: Serving) -> dict[str, float]:
    """reason -> refused requests for the model "tiny", without zeros."""
    counts = {reason: server.metric("refusals_total", model="tiny", reason=reason) for reason in REASONS}
    return {reason: count for reason, count in counts.items() if count}


def all_refused(server: Serving) -> float:
    """Requests to the model "tiny" that were not counted as 200."""
    statuses = map(str, set(STATUSES.values()))
    return sum(server.metric("requests_total", model="tiny", status=status) for status in statuses)


REFUSED: list[tuple[bytes, int | None, dict[str, str], int, str]] = [
    (b"{", None, {}, 400, "invalid_request"),
    (*GOOD, {"content_encoding": "br"}, 415, "unsupported_encoding"),
    (bytes(200_000), 0, {}, 413, "body_too_large"),
    (gzip.compress(bytes(200_000)), 0, {"content_encoding": "gzip"}, 413, "body_too_large"),
    (bytes(5000), None, {}, 413, "json_too_large"),
    (*hidden_request(rows(65)), {}, 400, "too_many_tokens"),
    (*hidden_request(np.full((1, HIDDEN), POISON, np.float32)), {}, 500, "step_failed"),
]


async def test_a_refusal_is_counted_by_its_reason() -> None:
    limits, expected = {"max_body_bytes": 100_000, "max_json_bytes": 2000}, Counter[str]()
    async with serving(tiny_settings(limits), serving_runner(EchoRunner(POISON))) as server:
        for body, header_length, headers, status, reason in REFUSED:
            output_of(await server.infer(*GOOD))
            assert refusals(server) == expected
            error_of(await server.infer(body, header_length, **headers), status)
            expected[reason] += 1
            assert refusals(server) == expected
            assert all_refused(server) == expected.total()


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
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
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


@pytest.mark.parametrize(
    ("seconds", "status", "reason"), [(0.01, 408, "body_timeout"), (30, 503, "shutting_down")]
)
async def test_an_incomplete_body_is_counted_by_the_reason_it_was_refused(
    seconds: float, status: int, reason: str
) -> None:
    connections: set[HttpConnection] = set()
    async with serving(tiny_settings({"body_timeout_seconds": seconds}), connections=connections) as server:
        with connect(server.port) as sock:
            sock.sendall(head(f"POST {INFER} HTTP/1.1", "Content-Length: 9"))
            if reason == "shutting_down":
                await until(lambda: any(each.has_pending_output for each in connections))
                for connection in connections:
                    connection.stop_reading()
            (answer,) = await asyncio.to_thread(read_to_end, sock)
        assert answer.status == status
        assert refusals(server) == {reason: 1}


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
