"""The executor alone: how it batches and orders requests, and how it handles failed steps and callers."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import pytest

from expertd.service.engine.errors import (
    QueueFullError,
    QueueTimeoutError,
    RequestRefusedError,
    SomeRefusedError,
    StepFailedError,
)
from expertd.service.engine.executor import Executor
from expertd.service.engine.lane import StepLane
from expertd.service.memory import host_view
from expertd.service.moe.request import LayerRequest, Output, StepResult
from expertd.service.settings.parts import Limits
from tests.service.runners import Computed, DeviceRunner, EchoRunner, Submitted, layer_request
from tests.service.waiting import until

T = TypeVar("T")


class Observed:
    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        self.failed: list[int] = []
        self.waited: list[float] = []  # seconds, by each request

    def step_done(self, model: str, result: StepResult, queue_seconds: Sequence[float]) -> None:
        assert all(seconds >= 0 for seconds in queue_seconds)
        self.waited += queue_seconds
        self.done.append((model, len(queue_seconds)))

    def step_failed(self, model: str, num_requests: int) -> None:
        self.failed.append(num_requests)


@asynccontextmanager
async def running(
    *runners: EchoRunner, observer: Observed | None = None, **limits: int
) -> AsyncIterator[Executor]:
    """An executor whose models "0", "1", ... have these runners."""
    defaults = {"max_request_tokens": 8, "max_batch_tokens": 8, "max_queue_tokens": 64}
    executor = Executor(StepLane(Limits.model_validate({**defaults, **limits}), observer or Observed()))
    executor.set_runners({str(i): runner for i, runner in enumerate(runners)})
    executor.start()
    try:
        yield executor
    finally:
        for runner in runners:
            runner.gate.set()
        assert executor.stop(timeout=10)


async def held(runner: EchoRunner, executor: Executor, model: str = "0") -> Submitted:
    """A request whose step waits at the runner's gate."""
    runner.gate.clear()
    pending = Submitted(executor, model, layer_request([0.0]))
    assert await asyncio.to_thread(runner.entered.acquire, True, 10)
    return pending


async def soon(answer: Awaitable[T]) -> T:
    """The answer, after one more iteration of the loop, which wait_for does not run from Python 3.12 on."""
    result = await asyncio.wait_for(answer, 10)
    await asyncio.sleep(0)
    return result


def values(answer: Output) -> list[float]:
    numbers: list[float] = np.frombuffer(host_view(answer), np.float32).tolist()
    return numbers


async def test_requests_that_wait_for_the_device_are_batched() -> None:
    runner, observed = EchoRunner(), Observed()
    async with running(runner, observer=observed) as executor:
        first = await held(runner, executor)
        others = [Submitted(executor, "0", layer_request([float(i)] * 2)) for i in range(6)]
        assert executor.waiting("0") == (6, 12)
        runner.gate.set()
        answers = [values(await soon(pending.answer)) for pending in (first, *others)]
    assert answers == [[0.0], *([float(i)] * 2 for i in range(6))]
    assert runner.steps == [[1], [2, 2, 2, 2], [2, 2]], "at most max_batch_tokens in a step"
    assert observed.done == [("0", 1), ("0", 4), ("0", 2)]


async def test_retry_after_depends_on_recent_step_times() -> None:
    runner = EchoRunner()
    async with running(runner, max_queue_tokens=16) as executor:
        first = await held(runner, executor)
        for _ in range(2):
            Submitted(executor, "0", layer_request([1.0] * 8))
        executor.lanes[0].queues["0"].step_seconds = 2.0
        with pytest.raises(QueueFullError) as caught:
            executor.check_capacity("0")
        assert caught.value.retry_after == 6, "two full steps waiting, one running, two seconds each"
        runner.gate.set()
        await soon(first.answer)
        await soon(executor.drained())


async def test_a_request_whose_step_would_end_too_late_is_not_computed() -> None:
    runner = EchoRunner()
    async with running(runner) as executor:
        first = await held(runner, executor)
        hasty = Submitted(executor, "0", layer_request([1.0]), timeout=50.0)
        patient = Submitted(executor, "0", layer_request([2.0, 3.0]))
        for _ in range(3):
            executor.lanes[0].queues["0"].forecast.note(3, 100.0)
        with pytest.raises(QueueFullError, match="timeout: expected about"):
            Submitted(executor, "0", layer_request([1.0]), timeout=50.0)
        runner.gate.set()
        with pytest.raises(QueueTimeoutError, match="of 50000000 microseconds expires before its step would"):
            await soon(hasty.answer)
        await soon(first.answer)
        await soon(patient.answer)
        await soon(executor.drained())
    assert runner.steps[1:] == [[2]]


async def test_no_report_of_a_step_waits_for_a_job() -> None:
    runner, observed = DeviceRunner(), Observed()
    begun, goes_on = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        assert goes_on.wait(10)

    async with running(runner, observer=observed) as executor:
        executor.set_device(0.0, leaves_cpu=True)
        pending = await held(runner, executor)
        done = executor.do_between_steps(job)
        runner.gate.set()
        try:
            assert await asyncio.to_thread(begun.wait, 10)
            await until(lambda: len(observed.done) == 1)
        finally:
            goes_on.set()
        await asyncio.wrap_future(done)
        await soon(pending.answer)


async def test_one_bad_request_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    runner, observed = EchoRunner(poison=666.0), Observed()
    async with running(runner, observer=observed) as executor:
        with caplog.at_level(logging.CRITICAL, "expertd.service.engine.stepping"):
            first = await held(runner, executor)
            good = [Submitted(executor, "0", layer_request([1.0])) for _ in range(2)]
            bad = Submitted(executor, "0", layer_request([666.0]))
            runner.gate.set()
            with pytest.raises(StepFailedError, match="the step failed: RuntimeError"):
                await soon(bad.answer)
            for pending in (first, *good):
                await soon(pending.answer)
    assert observed.failed == [3, 1]
    assert runner.steps == [[1], [1, 1, 1], [1], [1], [1]]


async def test_one_request_that_cannot_begin_is_refused_alone() -> None:
    class Refusing(EchoRunner):
        def begin(self, requests: Sequence[LayerRequest]) -> Computed:
            firsts = [np.frombuffer(host_view(request.hidden_states), np.float32)[0] for request in requests]
            if 666.0 in firsts:
                why = RequestRefusedError("memory: expected some, got none")
                raise SomeRefusedError({firsts.index(666.0): why})
            return super().begin(requests)

    runner, observed = Refusing(), Observed()
    async with running(runner, observer=observed) as executor:
        first = await held(runner, executor)
        good, bad, last = (Submitted(executor, "0", layer_request([value])) for value in (1.0, 666.0, 2.0))
        runner.gate.set()
        with pytest.raises(RequestRefusedError, match=r"^memory: expected some, got none$"):
            await soon(bad.answer)
        assert values(await soon(good.answer)) == [1.0]
        assert values(await soon(last.answer)) == [2.0]
        await soon(first.answer)
        assert executor.lanes[0].queues["0"].failures == 0
        assert runner.steps == [[1], [1, 1]], "the others are one step"
    assert observed.failed == [], "no step has failed"


async def test_a_cancelled_caller_does_not_disturb_the_others() -> None:
    runner = EchoRunner()
    async with running(runner) as executor:
        first = await held(runner, executor)
        cancelled, other = (Submitted(executor, "0", layer_request([float(i)])) for i in (1, 2))
        cancelled.answer.cancel()
        runner.gate.set()
        assert values(await soon(other.answer)) == [2.0]
        await soon(first.answer)
        await soon(executor.drained())


async def test_jobs_run_between_steps_and_before_waiting_requests() -> None:
    runner = EchoRunner()
    async with running(runner) as executor:
        first = await held(runner, executor)
        later = Submitted(executor, "0", layer_request([1.0]))
        job = asyncio.ensure_future(executor.between_steps(lambda: len(runner.steps)))
        await asyncio.sleep(0)
        assert not job.done()
        runner.gate.set()
        assert await soon(job) == 1, "after the current step, before the next one"
        await soon(first.answer)
        await soon(later.answer)


async def test_an_observer_that_raises_does_not_prevent_answers(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observed):
        def step_done(self, *_: Any) -> None:
            raise RuntimeError("no metrics today")

    async with running(EchoRunner(), observer=Broken()) as executor:
        assert values(await soon(Submitted(executor, "0", layer_request([1.0])).answer)) == [1.0]
    assert "no metrics today" in caplog.text


async def test_concurrent_callers_get_their_own_rows() -> None:
    runner = EchoRunner()
    async with running(runner, max_queue_tokens=4096) as executor:

        async def call(i: int) -> None:
            tokens = 1 + i % 8
            pending = Submitted(executor, "0", layer_request([float(i)] * tokens))
            assert values(await pending.answer) == [float(i)] * tokens

        await soon(asyncio.gather(*(call(i) for i in range(500))))
    assert sum(map(sum, runner.steps)) == sum(1 + i % 8 for i in range(500))
    assert len(runner.steps) < 500, "some of them shared a step"


async def test_a_step_that_outlasts_stop_is_reported_as_running() -> None:
    runner = EchoRunner()
    async with running(runner) as executor:
        pending = await held(runner, executor)
        assert not executor.stop(timeout=0.01)
        assert executor.running
        runner.gate.set()
        await soon(pending.answer)
    assert not executor.running
