"""A step that never ends: its request and those behind it are answered, and the process exits."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from expertd.service.engine.engine import Phase
from expertd.service.engine.errors import DeviceLostError
from expertd.service.engine.loading import LoadedLayers
from expertd.service.engine.step_time import StepTime
from expertd.service.engine.watchdog import limit_of
from expertd.service.settings.model import Settings
from tests.paths import ROOT
from tests.service.apps import error_of, hidden_request, rows, serving, serving_runner, tiny_settings
from tests.service.processes import ServerProcess, clean_environment, forked_python, started
from tests.service.runners import EchoRunner
from tests.service.waiting import until


async def test_every_request_is_answered_and_the_server_is_not_ready() -> None:
    runner = EchoRunner()
    settings = tiny_settings(step_timeout_seconds=0.5)
    async with serving(settings, serving_runner(runner)) as server, asyncio.timeout(60):
        assert (await server.infer(*hidden_request(rows(1)))).status_code == 200
        runner.gate.clear()
        stuck = [asyncio.create_task(server.infer(*hidden_request(rows(1)))) for _ in range(3)]
        for task in stuck:
            expected = "the device hangs: expected the end of a step within 0.5 s, got none"
            assert error_of(await task, 503) == expected
            assert "retry-after" not in (await task).headers, "the process ends"
        assert error_of(await server.http.get("/v2/health/ready"), 503) == expected
        assert (await server.http.get("/v2/health/live")).status_code == 200
        assert (await server.infer(*hidden_request(rows(1)))).status_code == 503
        runner.gate.set()  # the late end of the step answers nobody again
        await until(lambda: not server.app.engine.executor.lanes[0].step_in_flight()[0])
        await until(lambda: not server.app.engine.executor.unanswered)  # counted after the last answer


def test_a_step_may_take_many_times_as_long_as_before() -> None:
    assert limit_of(60.0, 0.0) == 60.0, "nothing is known of its size"
    assert limit_of(60.0, 0.001) == 10.0
    assert limit_of(60.0, 1.0) == 20.0
    assert limit_of(60.0, 10.0) == 60.0
    assert limit_of(5.0, 0.001) == 5.0


def test_a_step_is_late_by_its_own_time() -> None:
    now = 100.0
    times = StepTime("a rank", 2.0, lambda: now)

    def why_late(number: int | None, seconds: float, limit: float | None = None) -> str | None:
        """After looks at this step for some time."""
        nonlocal now
        why = None
        for _ in range(round(seconds / 0.25)):
            now += 0.25
            why = times.why_late(number, limit)
        return why

    assert why_late(None, 10.0) is None
    assert why_late(1, 2.0) is None
    assert why_late(2, 2.0) is None, "it had to wait for the first"
    expected = "a rank hangs: expected the end of a step within {} s, got none"
    assert why_late(2, 0.5) == expected.format(2)
    assert why_late(3, 2.0) is None
    assert why_late(4, 9.0, 10.0) is None, "another limit"
    assert why_late(4, 1.5, 10.0) == expected.format(10)
    assert why_late(5, 0.5) is None
    now += 100.0
    assert times.why_late(5) is None, "time in which this process did not run does not count"


async def test_a_device_that_has_failed_ends_the_server() -> None:
    """The step that fails first may not be the one to blame: every request gets 503."""
    runner, why = EchoRunner(poison=13.0), "CUDA error: an illegal memory access was encountered"

    def loader(settings: Settings, cancelled: Callable[[], bool]) -> LoadedLayers:
        loaded = serving_runner(runner)(settings, cancelled)
        return replace(loaded, failure=lambda: why)

    async with serving(tiny_settings(), loader) as server, asyncio.timeout(60):
        assert (await server.infer(*hidden_request(rows(1)))).status_code == 200
        runner.gate.clear()
        poison = hidden_request(np.full_like(rows(1), 13.0))
        first = asyncio.create_task(server.infer(*poison))
        for _ in range(2):
            await asyncio.to_thread(runner.entered.acquire)
        waiting = [asyncio.create_task(server.infer(*poison)) for _ in range(3)]  # every further step fails
        await until(lambda: server.app.engine.executor.waiting("tiny")[0] == 3)
        runner.gate.set()
        for task in (first, *waiting):
            assert error_of(await task, 503) == f"the device has failed: {why}"
        assert error_of(await server.http.get("/v2/health/ready"), 503) == f"the device has failed: {why}"
        assert server.app.engine.phase is Phase.FAILED, "which ends the process with code 1"
        await until(lambda: not server.app.engine.executor.unanswered)  # counted after the last answer


async def test_a_job_between_steps_that_never_ends_is_noticed() -> None:
    goes_on, settings = threading.Event(), tiny_settings(step_timeout_seconds=0.5)
    async with serving(settings, serving_runner(EchoRunner())) as server, asyncio.timeout(60):
        executor = server.app.engine.executor
        job = asyncio.ensure_future(executor.between_steps(lambda: goes_on.wait(60), 0.0))
        waits = asyncio.ensure_future(executor.between_steps(lambda: None))
        asked = asyncio.ensure_future(server.infer(*hidden_request(rows(1))))
        expected = "the device hangs: expected the end of what runs between two steps within 0.5 s, got none"
        assert error_of(await asked, 503) == expected
        for each in (job, waits, executor.between_steps(lambda: None)):
            with pytest.raises(DeviceLostError, match="the device hangs"):
                await each
        assert error_of(await server.http.get("/v2/health/ready"), 503) == expected
        assert server.app.engine.phase is Phase.FAILED
        goes_on.set()


@pytest.mark.slow
async def test_a_job_may_take_as_long_as_it_says_since_it_last_went_on() -> None:
    settings = tiny_settings(step_timeout_seconds=1)
    async with serving(settings, serving_runner(EchoRunner())) as server, asyncio.timeout(60):
        executor = server.app.engine.executor
        await executor.between_steps(lambda: time.sleep(1.5))

        def parts() -> None:
            for _ in range(15):
                time.sleep(0.1)
                executor.lanes[0].jobs.goes_on()

        await executor.between_steps(parts, 0.0)
        assert executor.lanes[0].job_in_flight() == (None, 0.0)
        assert server.app.engine.why_not_ready() is None
        assert (await server.infer(*hidden_request(rows(1)))).status_code == 200


class BrokenSource:
    """A source whose poll raises, which none may."""

    lane = 0

    def __init__(self) -> None:
        self._descriptor = os.eventfd(1)

    def fileno(self) -> int:
        return self._descriptor

    def poll(self) -> None:
        raise KeyError("channel")

    def is_awaited(self) -> bool:
        return False

    has_arrived = is_awaited


@pytest.mark.parametrize("what", ["call", "source"])
async def test_an_error_on_the_thread_of_the_steps_ends_the_server(
    what: str, caplog: pytest.LogCaptureFixture
) -> None:
    def call() -> None:
        raise KeyError("model")

    async with serving(tiny_settings(), serving_runner(EchoRunner())) as server, asyncio.timeout(60):
        executor = server.app.engine.executor
        assert (await server.infer(*hidden_request(rows(1)))).status_code == 200
        if what == "call":
            await executor.between_steps(lambda: executor.defer(call))
        else:
            executor.add_source(BrokenSource())
        await until(lambda: not executor.running)
        expected = "the thread of the steps has failed: KeyError"
        await until(lambda: server.app.engine.phase is Phase.FAILED)
        assert error_of(await server.http.get("/v2/health/ready"), 503) == expected
        error_of(await server.infer(*hidden_request(rows(1))), 503)
        with pytest.raises(DeviceLostError, match=expected):
            await executor.between_steps(lambda: None)
        assert server.app.engine.device_failed, "which ends the process with code 1"
    assert "the thread of the steps has failed" in caplog.text


SERVER = """
import sys, threading
from expertd.service.engine import engine
from expertd.service.http.server import serve
from expertd.service.util.logs import configure_logging
from tests.service.apps import serving_runner, tiny_settings
from tests.service.runners import EchoRunner

runner = EchoRunner()
runner.gate.clear()
configure_logging("info")
engine._STOP_SECONDS = 0.5
sys.exit(serve(tiny_settings(port=0, step_timeout_seconds=1), serving_runner(runner)))
"""


@pytest.mark.slow
def test_the_process_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    log, program = tmp_path / "server.log", tmp_path / "server.py"
    program.write_text(SERVER)
    with log.open("wb") as stderr:
        process = started([sys.executable, program], stderr, clean_environment())
    try:
        server = ServerProcess(process, log)
        server.wait_ready()
        body, length = hidden_request(rows(1))
        headers = {"Inference-Header-Content-Length": str(length)}
        url = f"http://{server.url}/v2/models/tiny/infer"
        answer = httpx.post(url, content=body, headers=headers, timeout=60, verify=False)
        assert "the device hangs" in error_of(answer, 503)
        assert process.wait(60) == 1
        assert "this process ends, and has to be started again" in log.read_text()
    finally:
        process.kill()
        process.wait()


STUCK = """
import asyncio, time
from expertd.service.engine import watchdog

class Stuck:
    def step_in_flight(self):
        return 1, 0.0

    def job_in_flight(self):
        return None, 0.0

async def main():
    watchdog._ANSWER_SECONDS = 0.2
    watchdog.Watchdog([Stuck()], 0.3, lambda why: None)
    time.sleep(30)

asyncio.run(main())
"""


def test_a_process_whose_event_loop_hangs_exits_at_once(tmp_path: Path) -> None:
    program = tmp_path / "stuck.py"
    program.write_text(STUCK)
    ran = forked_python(program)
    assert ran.returncode == 1
    assert "and the event loop too: exiting at once" in ran.stderr


async def test_its_thread_ends_with_the_server() -> None:
    def watchdogs() -> int:
        return sum(thread.name == "expertd-watchdog" for thread in threading.enumerate())

    await until(lambda: not watchdogs())
    async with serving(tiny_settings(), serving_runner(EchoRunner())):
        assert watchdogs() == 1
    await until(lambda: not watchdogs())
