"""Timeouts that pass while a request is parsed, computed or answered, and work that nobody waits for."""

import asyncio
import ctypes
import socket
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from expertd.service.http import responses
from expertd.service.inference import call
from expertd.service.inference.body import LARGE_BYTES
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
from tests.service.regions import (
    ROW,
    Device,
    enabled,
    region,
    region_input,
    region_output,
    register_cuda,
)
from tests.service.runners import EchoRunner
from tests.service.sockets import Answer, connect, infer, read_answer
from tests.service.sockets import infer as infer_bytes
from tests.service.waiting import until

TOKENS = 256
TIMEOUT = {"timeout": 500_000}  # a busy machine begins a step within it
LIMITS: dict[str, float] = {"max_request_tokens": TOKENS}
Region = Callable[[], npt.NDArray[np.float32]]
IN_ITS_STEP = "the request's timeout of 500000 microseconds expired in its step"


def refused(server: Serving, reason: str) -> float:
    return server.metric("refusals_total", model="tiny", reason=reason)


@pytest.mark.parametrize(("lanes", "seconds"), [({}, 1e-3), ({"decode_max_tokens": 2}, 0.2e-3)])
async def test_threads_ask_for_the_lock_sooner_than_by_default(lanes: dict[str, int], seconds: float) -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        async with serving(tiny_settings(lanes=lanes)):
            assert sys.getswitchinterval() == pytest.approx(seconds)
    finally:
        sys.setswitchinterval(before)


async def test_a_timeout_does_not_wait_for_the_requests_own_step() -> None:
    runner, values = EchoRunner(), rows(TOKENS)
    assert values.nbytes > LARGE_BYTES, "body and output are in the arena"
    async with serving(tiny_settings(LIMITS), serving_runner(runner)) as server:
        runner.gate.clear()
        with connect(server.port) as sock:
            sock.sendall(infer(*hidden_request(values, parameters=TIMEOUT, id="t")))
            await runner.begun()
            answer = await asyncio.to_thread(read_answer, sock)
            assert (answer.status, answer.error) == (503, f"{IN_ITS_STEP} (request id: t)")
            arena = server.arena
            assert arena.used_bytes >= 2 * values.nbytes, "the step uses them"
            sock.sendall(infer(*hidden_request(values)))
            await until(lambda: server.metric("queue_requests", model="tiny") == 1)
            runner.gate.set()
            assert (await asyncio.to_thread(read_answer, sock)).status == 200
            await until(lambda: arena.used_bytes == 0)
        assert refused(server, "queue_timeout") == 1
        assert server.counted(503) == 1
        assert server.counted(200) == 1


def answered_after(sock: socket.socket, request: bytes) -> tuple[float, Answer]:
    """How many seconds the answer took."""
    began = time.perf_counter()
    sock.sendall(request)
    answer = read_answer(sock)
    return time.perf_counter() - began, answer


async def lateness(in_own_step: bool) -> float:
    """Seconds after a timeout of 50 ms at which it is answered, while a step runs that would take a second.

    By a new server: one that had seen such steps would refuse the request at once.
    """
    runner, request = EchoRunner(), infer(*hidden_request(rows(1), parameters={"timeout": 50_000}))
    async with serving(tiny_settings(), serving_runner(runner)) as server:
        runner.gate.clear()
        step = asyncio.get_running_loop().call_later(1.0, runner.gate.set)
        if not in_own_step:
            other = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
            await runner.begun()
        with connect(server.port) as sock:
            seconds, answer = await asyncio.to_thread(answered_after, sock, request)
        assert answer.status == 503
        assert ("in its step" in answer.error) == in_own_step
        step.cancel()
        runner.gate.set()
        if not in_own_step:
            await other
    return seconds - 0.05


@pytest.mark.timing
@pytest.mark.parametrize("in_own_step", [True, False])
async def test_a_timeout_is_answered_when_it_passes(in_own_step: bool) -> None:
    late = [await lateness(in_own_step) for _ in range(7)]
    assert 0 <= statistics.median(late) < 0.025, late


@asynccontextmanager
async def region_of(server: Serving, device: Device | None = None) -> AsyncIterator[Region]:
    """A region "r", of the device if one is given: hidden states in its first row; yields its second one."""
    if device is not None:
        ctypes.memmove(device.address, rows(1).tobytes(), ROW)
        assert (await register_cuda(server, "r", 4 * ROW)).status_code == 200
        yield lambda: device.read(ROW, ROW)
        return
    async with region(server, 4 * ROW) as file:
        file.write(rows(1), 0)
        yield lambda: file.floats(1, HIDDEN, ROW)[0]


def region_request(timeout: int) -> bytes:
    """From the first row of the region "r" to its second one."""
    given = region_input("r", [1, HIDDEN], 0)
    return json_request(given, outputs=region_output("r", ROW, ROW), parameters={"timeout": timeout})


async def test_a_step_whose_request_was_answered_leaves_its_regions_as_they_are() -> None:
    runner = EchoRunner()
    async with serving(enabled(), serving_runner(runner)) as server, region_of(server) as output:
        runner.gate.clear()
        assert error_of(await server.infer(region_request(500_000)), 503) == IN_ITS_STEP
        path = "/v2/systemsharedmemory/region/r/unregister"
        unregistering = asyncio.ensure_future(server.http.post(path))
        done, _ = await asyncio.wait({unregistering}, timeout=0.1)
        assert not done, "its step holds the region"
        runner.gate.set()
        assert (await unregistering).status_code == 200
        assert (output() == 0).all()


@pytest.mark.parametrize("kind", ["system", "cuda"])
async def test_an_output_that_a_device_could_write_to_a_region_is_stored_if_in_time(kind: str) -> None:
    device = Device()
    async with (
        serving(enabled(), device.loader()) as server,
        region_of(server, device if kind == "cuda" else None) as output,
    ):
        device.runner.gate.clear()
        request = asyncio.ensure_future(server.infer(region_request(500_000)))
        await device.runner.begun()
        assert error_of(await request, 503) == IN_ITS_STEP
        device.runner.gate.set()
        await until(lambda: server.app.engine.executor.unanswered == 0)
        assert (output() == 0).all(), "it is the caller's again"
        assert (await server.infer(region_request(900_000))).status_code == 200
        np.testing.assert_array_equal(output(), 2 * rows(1)[0])
        assert device.written == ([(ROW, ROW)] if kind == "cuda" else [])
        assert (await server.infer(region_request(2_000_000))).status_code == 200
        assert len(device.written) == (kind == "cuda"), "the device writes outputs of requests with time"


async def test_an_output_that_only_ranks_can_write_to_a_region_is_waited_for() -> None:
    device = Device(writable=False)
    async with (
        serving(enabled(), device.loader()) as server,
        region_of(server, device) as output,
    ):
        device.runner.gate.clear()
        request = asyncio.ensure_future(server.infer(region_request(500_000)))
        await device.runner.begun()
        done, _ = await asyncio.wait({request}, timeout=0.7)
        assert not done
        device.runner.gate.set()
        assert (await request).status_code == 200
        np.testing.assert_array_equal(output(), 2 * rows(1)[0])


async def test_a_request_with_regions_whose_client_left_is_not_computed() -> None:
    runner = EchoRunner()
    async with serving(enabled(), serving_runner(runner)) as server, region_of(server):
        runner.gate.clear()
        first = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
        await runner.begun()
        body = json_request(region_input("r", [2, HIDDEN], 0))
        with connect(server.port) as sock:
            sock.sendall(infer(body, len(body)))
            await until(lambda: server.metric("queue_requests", model="tiny") == 1)
        await until(lambda: server.metric("queue_requests", model="tiny") == 0)
        await until(lambda: refused(server, "client_gone") == 1)
        runner.gate.set()
        output_of(await first)
    assert runner.steps == [[1]]


LONGER = {"timeout": 900_000}  # below it begins what is held
EXPIRED = "the request's timeout of {} microseconds expired {}"
BEFORE_QUEUE, BEFORE_ANSWER = "before it was queued", "before its answer was ready"


class Held:
    """A function that waits for `gate` before it does what `function` does."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()

    async def begun(self) -> None:
        """Wait until it was called."""
        assert await asyncio.to_thread(self.entered.acquire, True, 60)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.entered.release()
        assert self.gate.wait(60)
        return self._function(*arguments, **named)


def hold(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> Held:
    """Replace a function by one that a test holds."""
    held = Held(getattr(owner, name))
    monkeypatch.setattr(owner, name, lambda *arguments, **named: held(*arguments, **named))
    return held


@pytest.mark.parametrize("num_tokens", [0, 1, TOKENS])
async def test_a_timeout_begins_when_the_body_is_complete(num_tokens: int) -> None:
    runner, values = EchoRunner(), rows(num_tokens)
    body = json_request(json_input(values), parameters={"timeout": 1, "binary_data_output": True})
    assert num_tokens < TOKENS or len(body) > INLINE_BYTES, "it is parsed in a thread"
    async with serving(tiny_settings(LIMITS), serving_runner(runner)) as server:
        where = BEFORE_QUEUE if num_tokens else BEFORE_ANSWER
        assert error_of(await server.infer(body), 503) == EXPIRED.format(1, where)
        assert refused(server, "queue_timeout") == 1
        output_of(await server.infer(*hidden_request(rows(1))))
    assert runner.steps == [[1]]


async def test_a_timeout_does_not_wait_for_an_answer_that_is_compressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, values = EchoRunner(), rows(TOKENS)
    held = hold(monkeypatch, responses, "compress")
    async with serving(tiny_settings(LIMITS), serving_runner(runner)) as server:
        arena = server.arena
        with connect(server.port) as sock:
            request = hidden_request(values, parameters=LONGER)
            sock.sendall(infer_bytes(*request, "Accept-Encoding: gzip"))
            await held.begun()
            answer = await asyncio.to_thread(read_answer, sock)
            assert (answer.status, answer.error) == (503, EXPIRED.format(900_000, BEFORE_ANSWER))
            assert arena.used_bytes >= values.nbytes, "the thread uses them"
            held.gate.set()
            await until(lambda: arena.used_bytes == 0)
            sock.sendall(infer_bytes(*hidden_request(values)))
            assert (await asyncio.to_thread(read_answer, sock)).status == 200
        assert refused(server, "queue_timeout") == 1
        assert server.counted(503) == 1


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
    body = json_request(json_input(values), *routing, parameters=LONGER)
    async with serving(tiny_settings(LIMITS), serving_runner(runner)) as server:
        request = asyncio.ensure_future(server.infer(body))
        await held.begun()
        assert error_of(await request, 503) == EXPIRED.format(900_000, BEFORE_QUEUE)
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
        async with region(server, 2 * size) as file:
            file.write(rows(TOKENS), 0)
            given = region_input("r", [TOKENS, HIDDEN], 0)
            body = json_request(given, outputs=region_output("r", size, size), parameters=LONGER)
            request = asyncio.ensure_future(server.infer(body))
            await held.begun()
            done, _ = await asyncio.wait({request}, timeout=1.1)
            assert not done, "the caller may use the region once it is answered"
            held.gate.set()
            assert error_of(await request, 503) == EXPIRED.format(900_000, BEFORE_ANSWER)
        assert refused(server, "queue_timeout") == 1
