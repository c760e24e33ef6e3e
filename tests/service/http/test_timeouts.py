"""Timeouts that pass while the request's own step runs, and work that nobody waits for."""

import asyncio
import ctypes
import socket
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import numpy.typing as npt
import pytest

from expertd.service.inference.body import LARGE_BYTES
from tests.service.apps import (
    HIDDEN,
    Serving,
    error_of,
    hidden_request,
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
    region_input,
    region_output,
    register_cuda,
    registered,
)
from tests.service.runners import EchoRunner
from tests.service.shm import shm_file
from tests.service.sockets import Answer, connect, infer, read_answer
from tests.service.waiting import until

TOKENS = 256
TIMEOUT = {"timeout": 100_000}  # a busy machine begins a step within it
LIMITS = {"max_request_tokens": TOKENS}
Region = Callable[[], npt.NDArray[np.float32]]
IN_ITS_STEP = "the request's timeout of 100000 microseconds expired in its step"


async def in_step(runner: EchoRunner) -> None:
    assert await asyncio.to_thread(runner.entered.acquire, True, 10)


def refused(server: Serving, reason: str) -> float:
    return server.metric("refusals_total", model="tiny", reason=reason)


async def test_a_timeout_does_not_wait_for_the_requests_own_step() -> None:
    runner, values = EchoRunner(), rows(TOKENS)
    assert values.nbytes > LARGE_BYTES, "body and output are in the arena"
    async with serving(tiny_settings(LIMITS), serving_runner(runner)) as server:
        runner.gate.clear()
        with connect(server.port) as sock:
            sock.sendall(infer(*hidden_request(values, parameters=TIMEOUT, id="t")))
            await in_step(runner)
            answer = await asyncio.to_thread(read_answer, sock)
            assert (answer.status, answer.error) == (503, f"{IN_ITS_STEP} (request id: t)")
            arena = server.app.engine.arena
            assert arena is not None
            assert arena.used_bytes >= 2 * values.nbytes, "the step uses them"
            sock.sendall(infer(*hidden_request(values)))
            await until(lambda: server.metric("queue_requests", model="tiny") == 1)
            runner.gate.set()
            assert (await asyncio.to_thread(read_answer, sock)).status == 200
            await until(lambda: arena.used_bytes == 0)
        assert refused(server, "queue_timeout") == 1
        assert server.metric("requests_total", model="tiny", status="503") == 1
        assert server.metric("requests_total", model="tiny", status="200") == 1


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
            await in_step(runner)
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


async def test_a_step_whose_request_was_answered_leaves_its_regions_as_they_are() -> None:
    runner = EchoRunner()
    async with serving(enabled(), serving_runner(runner)) as server:
        with shm_file(4 * ROW) as file:
            file.write(rows(1), 0)
            await registered(server, "r", file.key, 4 * ROW)
            runner.gate.clear()
            given = region_input("r", [1, HIDDEN], 0)
            body = json_request(given, outputs=region_output("r", ROW, ROW), parameters=TIMEOUT)
            assert error_of(await server.infer(body), 503) == IN_ITS_STEP
            file.write(rows(1, 5), ROW)
            unregistering = asyncio.ensure_future(
                server.http.post("/v2/systemsharedmemory/region/r/unregister")
            )
            done, _ = await asyncio.wait({unregistering}, timeout=0.1)
            assert not done, "its step holds the region"
            runner.gate.set()
            assert (await unregistering).status_code == 200
            np.testing.assert_array_equal(file.floats(1, HIDDEN, ROW), rows(1, 5))


@asynccontextmanager
async def region_of(server: Serving, device: Device, kind: str) -> AsyncIterator[Region]:
    """A region "r" with hidden states in its first row, and its second row."""
    if kind == "cuda":
        ctypes.memmove(device.address, rows(1).tobytes(), ROW)
        assert (await register_cuda(server, "r", 4 * ROW)).status_code == 200
        yield lambda: device.read(ROW, ROW)
        return
    with shm_file(4 * ROW) as file:
        file.write(rows(1), 0)
        await registered(server, "r", file.key, 4 * ROW)
        yield lambda: file.floats(1, HIDDEN, ROW)[0]


def region_request(timeout: int) -> bytes:
    """From the first row of the region "r" to its second one."""
    given = region_input("r", [1, HIDDEN], 0)
    return json_request(given, outputs=region_output("r", ROW, ROW), parameters={"timeout": timeout})


@pytest.mark.parametrize("kind", ["system", "cuda"])
async def test_an_output_that_a_device_could_write_to_a_region_is_stored_if_in_time(kind: str) -> None:
    device = Device()
    async with (
        serving(enabled(), device.loader()) as server,
        region_of(server, device, kind) as output,
    ):
        device.runner.gate.clear()
        request = asyncio.ensure_future(server.infer(region_request(100_000)))
        await in_step(device.runner)
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
        region_of(server, device, "cuda") as output,
    ):
        device.runner.gate.clear()
        request = asyncio.ensure_future(server.infer(region_request(100_000)))
        await in_step(device.runner)
        done, _ = await asyncio.wait({request}, timeout=0.3)
        assert not done
        device.runner.gate.set()
        assert (await request).status_code == 200
        np.testing.assert_array_equal(output(), 2 * rows(1)[0])


async def test_a_request_with_regions_whose_client_left_is_not_computed() -> None:
    runner = EchoRunner()
    async with serving(enabled(), serving_runner(runner)) as server:
        with shm_file(4 * ROW) as file:
            await registered(server, "r", file.key, 4 * ROW)
            runner.gate.clear()
            first = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
            await in_step(runner)
            body = json_request(region_input("r", [2, HIDDEN], 0))
            with connect(server.port) as sock:
                sock.sendall(infer(body, len(body)))
                await until(lambda: server.metric("queue_requests", model="tiny") == 1)
            await until(lambda: server.metric("queue_requests", model="tiny") == 0)
            await until(lambda: refused(server, "client_gone") == 1)
            runner.gate.set()
            output_of(await first)
    assert runner.steps == [[1]]
