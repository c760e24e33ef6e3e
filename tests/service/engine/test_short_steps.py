"""Short steps of a caller that is alone: they run on the event loop, and nothing else changes."""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import pytest

from expertd.service.engine.errors import (
    QueueTimeoutError,
    StepFailedError,
)
from expertd.service.engine.executor import Executor
from expertd.service.memory import host_view
from expertd.service.moe.request import LayerRequest
from tests.service.apps import hidden_request, rows, serving, serving_runner, tiny_settings
from tests.service.engine.test_executor import Observed, running
from tests.service.engine.test_wakeup import belled
from tests.service.runners import Computed, EchoRunner, Submitted, layer_request
from tests.service.sockets import connect, infer, read_answer
from tests.service.waiting import until


class Threads(EchoRunner):
    """Notes whether each step ran on the event loop."""

    def __init__(self, seconds: float = 0.0001, poison: float | None = None) -> None:
        super().__init__(poison)
        self.seconds = seconds
        self.here: list[bool] = []

    def begin(self, requests: Sequence[LayerRequest]) -> Computed:
        self.here.append(threading.current_thread() is threading.main_thread())
        return super().begin(requests)


async def asleep(executor: Executor) -> None:
    """Wait until the worker thread has nothing to do."""
    await until(lambda: executor.lanes[0].is_asleep)


async def alone(executor: Executor, values: Sequence[float]) -> float:
    """The first value of the answer to a request of a caller that is alone."""
    await asleep(executor)
    output = await Submitted(executor, "0", layer_request(values), alone=True).answer
    return float(np.frombuffer(host_view(output), np.float32)[0])


async def test_a_step_runs_here_once_its_size_is_known_to_be_short() -> None:
    runner, observer = Threads(), Observed()
    async with running(runner, observer=observer) as executor:
        assert [await alone(executor, [value]) for value in (1.0, 2.0, 3.0)] == [1.0, 2.0, 3.0]
        assert await alone(executor, [4.0] * 8) == 4.0, "another size"
        assert await alone(executor, [5.0] * 8) == 5.0
        await until(lambda: len(observer.done) == 5)
    assert runner.here == [False, True, True, False, True]


async def test_long_steps_do_not() -> None:
    runner = Threads(seconds=0.01)
    async with running(runner) as executor:
        for value in (1.0, 2.0, 3.0):
            assert await alone(executor, [value]) == value
    assert not any(runner.here)


async def test_requests_that_arrive_together_share_a_step_of_the_worker() -> None:
    runner = Threads()
    async with running(runner) as executor:
        await alone(executor, [1.0])
        await asleep(executor)
        both = [Submitted(executor, "0", layer_request([value]), alone=True) for value in (2.0, 3.0)]
        await asyncio.gather(*(submitted.answer for submitted in both))
    assert runner.steps == [[1], [1, 1]]
    assert not any(runner.here)


async def test_work_between_steps_comes_first() -> None:
    runner = Threads()
    async with running(runner) as executor:
        await alone(executor, [1.0])
        await asleep(executor)
        submitted = Submitted(executor, "0", layer_request([2.0]), alone=True)
        assert await executor.between_steps(lambda: len(runner.steps)) == 1
        await submitted.answer
    assert runner.here == [False, False]


async def test_a_source_waits_for_a_step_that_runs_here() -> None:
    runner, observer = Threads(), Observed()
    async with belled(runner, observer) as (executor, bell, answers):
        await alone(executor, [1.0])
        await asleep(executor)
        runner.entered.acquire()
        runner.gate.clear()
        begun = 0

        def ring() -> None:
            nonlocal begun
            runner.entered.acquire()  # the next step has begun, and blocks the event loop
            bell.ring(3.0)
            time.sleep(0.05)
            begun = len(runner.steps)
            runner.gate.set()

        thread = threading.Thread(target=ring)
        thread.start()
        await Submitted(executor, "0", layer_request([2.0]), alone=True).answer
        thread.join()
        await until(lambda: len(answers) == 1)
    assert begun == 2
    assert runner.here == [False, True, False]


async def test_a_cancelled_request_has_no_step() -> None:
    runner = Threads()
    async with running(runner) as executor:
        await alone(executor, [1.0])
        await asleep(executor)
        submitted = Submitted(executor, "0", layer_request([2.0]), alone=True)
        assert executor.cancel(submitted.pending, QueueTimeoutError("late"))
        with pytest.raises(QueueTimeoutError):
            await submitted.answer
        assert await alone(executor, [3.0]) == 3.0
    assert runner.steps == [[1], [1]]


async def test_a_failed_step() -> None:
    runner = Threads(poison=2.0)
    async with running(runner) as executor:
        await alone(executor, [1.0])
        with pytest.raises(StepFailedError, match="RuntimeError"):
            await alone(executor, [2.0])
        assert executor.failures("0") == 1
        assert await alone(executor, [3.0]) == 3.0
        assert executor.failures("0") == 0
        await asyncio.wait_for(executor.drained(), 60)
    assert runner.here == [False, True, True]


@pytest.mark.parametrize("callers", [1, 2])
async def test_over_http_after_some_requests_of_one_connection(callers: int) -> None:
    runner = Threads()
    async with serving(tiny_settings(), serving_runner(runner)) as server:
        with ExitStack() as stack:
            socks = [stack.enter_context(connect(server.port)) for _ in range(callers)]
            for number in range(24):
                await asleep(server.app.engine.executor)
                sock, hidden_states = socks[number % callers], rows(1, number)
                sock.sendall(infer(*hidden_request(hidden_states)))
                answer = await asyncio.to_thread(read_answer, sock)
                assert answer.body.endswith(hidden_states.tobytes())
    assert not any(runner.here[:8])
    assert all(runner.here[9:]) == (callers == 1)
    assert any(runner.here) == (callers == 1)
