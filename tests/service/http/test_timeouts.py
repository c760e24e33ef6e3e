"""Timeouts that pass while the request's own step runs, and work that nobody waits for."""

import asyncio

import numpy as np

from expertd.service.http.infer_body import LARGE_BYTES
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
from tests.service.regions import ROW, Device, enabled, region_input, region_output, registered
from tests.service.runners import EchoRunner
from tests.service.shm import shm_file
from tests.service.sockets import connect, infer, listening, read_answer
from tests.service.waiting import until

TOKENS = 256
TIMEOUT = {"timeout": 20_000}
LIMITS = {"max_request_tokens": TOKENS}
IN_ITS_STEP = "the request's timeout of 20000 microseconds expired in its step"


async def in_step(runner: EchoRunner) -> None:
    assert await asyncio.to_thread(runner.entered.acquire, True, 10)


def refused(server: Serving, reason: str) -> float:
    return server.metric("refusals_total", model="tiny", reason=reason)


async def test_a_timeout_does_not_wait_for_the_requests_own_step() -> None:
    runner, values = EchoRunner(), rows(TOKENS)
    assert values.nbytes > LARGE_BYTES, "body and output are in the arena"
    async with serving(tiny_settings(LIMITS), serving_runner(runner)) as server, listening(server) as port:
        runner.gate.clear()
        with connect(port) as sock:
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


async def test_a_client_that_leaves_after_its_timeout_is_counted_once() -> None:
    runner = EchoRunner()
    async with serving(tiny_settings(), serving_runner(runner)) as server:
        runner.gate.clear()
        request = asyncio.ensure_future(server.infer(*hidden_request(rows(1), parameters=TIMEOUT)))
        await in_step(runner)
        assert error_of(await request, 503) == IN_ITS_STEP
        runner.gate.set()
        output_of(await server.infer(*hidden_request(rows(1))))
        assert refused(server, "queue_timeout") == 1
        assert refused(server, "client_gone") == 0


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


async def test_an_output_that_the_device_writes_to_a_region_is_waited_for() -> None:
    device = Device()
    async with serving(enabled(), device.loader()) as server:
        with shm_file(4 * ROW) as file:
            file.write(rows(1), 0)
            await registered(server, "r", file.key, 4 * ROW)
            device.runner.gate.clear()
            given = region_input("r", [1, HIDDEN], 0)
            body = json_request(given, outputs=region_output("r", ROW, ROW), parameters=TIMEOUT)
            request = asyncio.ensure_future(server.infer(body))
            await in_step(device.runner)
            done, _ = await asyncio.wait({request}, timeout=0.1)
            assert not done
            device.runner.gate.set()
            assert (await request).status_code == 200
            np.testing.assert_array_equal(file.floats(1, HIDDEN, ROW), 2 * rows(1))


async def test_a_request_with_regions_whose_client_left_is_not_computed() -> None:
    runner = EchoRunner()
    async with serving(enabled(), serving_runner(runner)) as server, listening(server) as port:
        with shm_file(4 * ROW) as file:
            await registered(server, "r", file.key, 4 * ROW)
            runner.gate.clear()
            first = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
            await in_step(runner)
            body = json_request(region_input("r", [2, HIDDEN], 0))
            with connect(port) as sock:
                sock.sendall(infer(body, len(body)))
                await until(lambda: server.metric("queue_requests", model="tiny") == 1)
            await until(lambda: server.metric("queue_requests", model="tiny") == 0)
            await until(lambda: refused(server, "client_gone") == 1)
            runner.gate.set()
            output_of(await first)
    assert runner.steps == [[1]]
