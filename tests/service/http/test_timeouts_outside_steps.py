"""Timeouts that pass while a request is parsed or validated, or while its answer is made."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from expertd.service.http import responses
from expertd.service.inference import call
from expertd.service.inference.threads import INLINE_BYTES, Where
from expertd.service.memory import RegionUses
from tests.service.apps import (
    HIDDEN,
    Serving,
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
from tests.service.regions import Device, enabled, region_input, region_output, registered
from tests.service.runners import EchoRunner
from tests.service.shm import shm_file
from tests.service.sockets import connect, read_answer
from tests.service.sockets import infer as infer_bytes
from tests.service.waiting import until

TOKENS = 128  # in gzip, their answer is made in a thread
LIMITS: dict[str, float] = {"max_request_tokens": TOKENS}
TIMEOUT = {"timeout": 300_000}
EXPIRED = "the request's timeout of {} microseconds expired {}"
BEFORE_QUEUE, BEFORE_ANSWER = "before it was queued", "before its answer was ready"


class Held:
    """A function that waits for `gate` before it does what `function` does."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.entered.release()
        assert self.gate.wait(10)
        return self._function(*arguments, **named)


def hold(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Held:
    """Replace a function by one that a test holds."""
    held = Held(getattr(owner, name))
    monkeypatch.setattr(owner, name, lambda *arguments, **named: held(*arguments, **named))
    return held


async def entered(held: Held) -> None:
    assert await asyncio.to_thread(held.entered.acquire, True, 10)


def timeouts(server: Serving) -> float:
    return server.metric("refusals_total", model="tiny", reason="queue_timeout")


@pytest.mark.parametrize("num_tokens", [0, 1, TOKENS])
async def test_a_timeout_begins_when_the_body_is_complete(num_tokens: int) -> None:
    runner, values = EchoRunner(), rows(num_tokens)
    body = json_request(json_input(values), parameters={"timeout": 1, "binary_data_output": True})
    assert num_tokens < TOKENS or len(body) > INLINE_BYTES, "it is parsed in a thread"
    async with serving(tiny_settings(LIMITS), serving_runner(runner)) as server:
        where = BEFORE_QUEUE if num_tokens else BEFORE_ANSWER
        assert error_of(await server.infer(body), 503) == EXPIRED.format(1, where)
        assert timeouts(server) == 1
        output_of(await server.infer(*hidden_request(rows(1))))
    assert runner.steps == [[1]]


async def test_a_timeout_does_not_wait_for_an_answer_that_is_compressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, values = EchoRunner(), rows(TOKENS)
    held = hold(monkeypatch, responses, "compress")
    async with serving(tiny_settings(LIMITS), serving_runner(runner)) as server:
        arena = server.app.engine.arena
        assert arena is not None
        with connect(server.port) as sock:
            request = hidden_request(values, parameters=TIMEOUT)
            sock.sendall(infer_bytes(*request, "Accept-Encoding: gzip"))
            await entered(held)
            answer = await asyncio.to_thread(read_answer, sock)
            assert (answer.status, answer.error) == (503, EXPIRED.format(300_000, BEFORE_ANSWER))
            assert arena.used_bytes >= values.nbytes, "the thread uses them"
            held.gate.set()
            await until(lambda: arena.used_bytes == 0)
            sock.sendall(infer_bytes(*hidden_request(values)))
            assert (await asyncio.to_thread(read_answer, sock)).status == 200
        assert timeouts(server) == 1
        assert server.metric("requests_total", model="tiny", status="503") == 1


async def test_a_request_that_is_validated_when_its_timeout_passes_is_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, values = EchoRunner(), rows(TOKENS)
    held = hold(monkeypatch, runner, "validate")
    monkeypatch.setattr(call, "thread_from", lambda num_bytes: Where.ANY_THREAD)
    routing = (
        json_input(np.tile(np.arange(2, dtype=np.int32), (TOKENS, 1)), "topk_ids", "INT32"),
        json_input(np.zeros((TOKENS, 2), np.float32), "topk_weights"),
    )
    body = json_request(json_input(values), *routing, parameters=TIMEOUT)
    async with serving(tiny_settings(LIMITS), serving_runner(runner)) as server:
        request = asyncio.ensure_future(server.infer(body))
        await entered(held)
        assert error_of(await request, 503) == EXPIRED.format(300_000, BEFORE_QUEUE)
        held.gate.set()
        output_of(await server.infer(*hidden_request(rows(1))))
    assert runner.steps == [[1]]


async def test_an_output_that_is_being_stored_in_a_region_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, size = Device(), 4 * HIDDEN * TOKENS
    held = hold(monkeypatch, RegionUses, "store")
    monkeypatch.setattr(call, "thread_from", lambda num_bytes: Where.ANY_THREAD)
    async with serving(enabled(LIMITS), device.loader()) as server:
        with shm_file(2 * size) as file:
            file.write(rows(TOKENS), 0)
            await registered(server, "r", file.key, 2 * size)
            given = region_input("r", [TOKENS, HIDDEN], 0)
            body = json_request(given, outputs=region_output("r", size, size), parameters=TIMEOUT)
            request = asyncio.ensure_future(server.infer(body))
            await entered(held)
            done, _ = await asyncio.wait({request}, timeout=0.5)
            assert not done, "the caller may use the region once it is answered"
            held.gate.set()
            assert error_of(await request, 503) == EXPIRED.format(300_000, BEFORE_ANSWER)
        assert timeouts(server) == 1
