"""The life of regions: held while requests use them, freed when their caller is gone."""

import asyncio
import threading
from typing import Any

import httpx
import numpy as np
import pytest

from expertd.service.engine import shared_memory
from expertd.service.memory import SystemMemory
from tests.service.apps import (
    HIDDEN,
    error_of,
    json_request,
    rows,
    serving,
    serving_runner,
)
from tests.service.regions import (
    SYSTEM,
    AddressRunner,
    Device,
    enabled,
    region_input,
    region_output,
    register_cuda,
    registered,
    totals,
)
from tests.service.shm import shm_file
from tests.service.waiting import until

SIZE = 16384
GOOD = region_input("r", [2, HIDDEN], 0)


@pytest.mark.parametrize("on_device", [False, True])
async def test_unregister_waits_for_the_requests_that_use_the_region(on_device: bool) -> None:
    device = Device()
    runner = device.runner
    async with serving(enabled(), device.loader() if on_device else serving_runner(runner)) as server:
        with shm_file(SIZE) as file:
            file.write(rows(2))
            await registered(server, "r", file.key, SIZE)
            body = json_request(GOOD, outputs=region_output("r", 1024, 4096))
            runner.gate.clear()
            running = asyncio.create_task(server.infer(body))
            await until(lambda: runner.entered.acquire(blocking=False))
            queued = asyncio.create_task(server.infer(body))
            await until(lambda: server.metric("queue_requests", model="tiny") == 1)
            gone = [asyncio.create_task(server.http.post(f"{SYSTEM}/region/r/unregister")) for _ in range(2)]
            await until(lambda: server.app.engine.shared_memory.status("system") == [])
            assert error_of(await server.infer(body), 400).startswith("input hidden_states: expected a regis")
            assert not any(task.done() for task in gone)
            assert totals(server) == (1, SIZE), "held until it is freed"
            assert len(device.registered) == on_device
            runner.gate.set()
            assert [(await task).status_code for task in (running, queued, *gone)] == [200] * 4
            assert totals(server) == (0, 0)
            assert device.registered == {}
            np.testing.assert_array_equal(file.floats(2, HIDDEN, 4096), 2 * rows(2))


async def test_unregister_waits_for_a_registration_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, begun = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> SystemMemory:
        begun.set()
        assert opened.wait(60)
        return SystemMemory(*arguments)

    monkeypatch.setattr(shared_memory, "SystemMemory", slow)
    async with serving(enabled(), serving_runner(AddressRunner())) as server:
        with shm_file(SIZE) as file:
            registering = asyncio.create_task(registered(server, "r", file.key, SIZE))
            assert await asyncio.to_thread(begun.wait, 60)
            all_cuda = await server.http.post("/v2/cudasharedmemory/unregister")
            assert all_cuda.status_code == 200, "other kinds do not wait"
            paths = (f"{SYSTEM}/region/r/unregister", f"{SYSTEM}/unregister")
            gone = [asyncio.create_task(server.http.post(path)) for path in paths]
            await asyncio.wait(gone, timeout=0.1)
            opened.set()
            assert [(await task).status_code for task in gone] == [200, 200]
            await registering
            assert totals(server) == (0, 0)


async def test_a_region_is_released_whatever_becomes_of_the_request() -> None:
    device = Device(AddressRunner(poison=float(rows(2)[0, 0])))
    limits: dict[str, float] = {"max_queue_requests": 1}
    async with serving(enabled(limits), device.loader()) as server:
        with shm_file(SIZE) as file:
            await registered(server, "r", file.key, SIZE)
            file.write(rows(2))
            body = json_request(GOOD, parameters={"timeout": 1})
            assert (await server.infer(json_request(GOOD))).status_code == 500
            file.write(rows(2, seed=1))
            device.runner.gate.clear()
            tasks = [asyncio.create_task(server.infer(json_request(GOOD)))]
            await until(lambda: len(device.runner.steps) == 2)
            tasks += [asyncio.create_task(server.infer(body)) for _ in range(2)]
            await until(lambda: sum(task.done() for task in tasks) == 2)
            tasks.append(asyncio.create_task(server.infer(json_request(GOOD))))
            await until(lambda: server.metric("queue_requests", model="tiny") == 1)
            tasks[-1].cancel()
            (region,) = server.app.engine.shared_memory.status("system")
            await until(lambda: region.uses == 1)  # nobody waits for the last one any more
            device.runner.gate.set()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            statuses = [a.status_code for a in answers if isinstance(a, httpx.Response)]
            assert sorted(statuses) == [200, 503, 503], "the queue is full, or the timeout expires"
            await server.app.engine.executor.drained()
            await until(lambda: region.uses == 0)


async def test_regions_whose_caller_is_gone_are_freed_by_a_periodic_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "CHECK_SECONDS", 0.005)
    device = Device()
    async with serving(enabled(), device.loader()) as server:
        with shm_file(SIZE) as file, shm_file(SIZE) as other:
            await registered(server, "r", file.key, SIZE)
            await registered(server, "kept", other.key, SIZE)
            await register_cuda(server, "gpu", 100)
            file.unlink()
            await until(lambda: totals(server) == (1, SIZE))
            assert len(device.registered) == 1
            (region,) = server.app.engine.shared_memory.status("cuda")
            region.last_used -= 601
            await until(lambda: totals(server, "cuda") == (0, 0))
            assert device.closed == 1
            assert [r.name for r in server.app.engine.shared_memory.status("system")] == ["kept"]


async def test_the_check_outlives_a_failure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_memory, "CHECK_SECONDS", 0.005)
    device = Device()

    def fail() -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(device, "_close", fail)
    async with serving(enabled(idle_seconds=0.001), device.loader()) as server:
        await register_cuda(server, "gpu", 100)
        await until(lambda: "failed to free the regions" in caplog.text)
        await register_cuda(server, "gpu", 100)
        await until(lambda: caplog.text.count("failed to free the regions") == 2)
        assert totals(server, "cuda") == (0, 0)


async def test_the_end_of_the_server_frees_all_regions() -> None:
    device = Device()
    with shm_file(SIZE) as file:
        async with serving(enabled(), device.loader()) as server:
            await registered(server, "r", file.key, SIZE)
            await register_cuda(server, "gpu", 100)
            assert file.is_mapped()
        assert (device.registered, device.closed) == ({}, 1)
        assert not file.is_mapped()
        assert file.times_open() == 0
