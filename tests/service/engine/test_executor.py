"""The executor alone: how it batches and orders requests, and how it handles failed steps and callers."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from expertd.service.engine.errors import (
    ExecutorClosedError,
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
from tests.service.runners import Computed, DeviceRunner, EchoRunner, Submitted, Turnstile, layer_request
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


async def test_requests_keep_their_order_and_models_alternate() -> None:
    order: list[str] = []

    def done(model: str, _: object) -> None:
        order.append(model)

    runners = EchoRunner(), EchoRunner()
    async with running(*runners) as executor:
        first = await held(runners[0], executor)
        pendings = [Submitted(executor, "0", layer_request([1.0] * 8)) for _ in range(3)]
        pendings += [Submitted(executor, "1", layer_request([2.0] * 8)) for _ in range(2)]
        for pending in pendings:
            pending.answer.add_done_callback(partial(done, pending.model))
        runners[0].gate.set()
        for pending in (first, *pendings):
            await soon(pending.answer)
    assert order == ["0", "1", "0", "1", "0"]


async def test_urgent_requests_come_first_and_equal_ones_in_their_order() -> None:
    order: list[int] = []

    def done(number: int, _: object) -> None:
        order.append(number)

    runner = EchoRunner()
    async with running(runner) as executor:
        first = await held(runner, executor)
        priorities = (128, 7, 255, 128, 7, 1)
        pendings = [
            Submitted(executor, "0", layer_request([1.0] * 8), priority=priority) for priority in priorities
        ]
        for number, pending in enumerate(pendings):
            pending.answer.add_done_callback(partial(done, number))
        assert executor.waiting("0") == (6, 48)
        assert executor.cancel(pendings[4].pending, TimeoutError())
        with pytest.raises(TimeoutError):
            await pendings[4].answer
        runner.gate.set()
        for pending in (first, *pendings[:4], pendings[5]):
            await soon(pending.answer)
    assert order == [4, 5, 1, 0, 3, 2]


async def test_a_model_with_an_urgent_request_comes_before_its_turn() -> None:
    order: list[tuple[str, int]] = []

    def done(each: tuple[str, int], _: object) -> None:
        order.append(each)

    runners = EchoRunner(), EchoRunner()
    async with running(*runners) as executor:
        first = await held(runners[0], executor)
        given = [("0", 128), ("0", 128), ("1", 128), ("1", 1), ("1", 1)]
        pendings = [
            Submitted(executor, model, layer_request([1.0] * 8), priority=priority)
            for model, priority in given
        ]
        for each, pending in zip(given, pendings, strict=True):
            pending.answer.add_done_callback(partial(done, each))
        runners[0].gate.set()
        for pending in (first, *pendings):
            await soon(pending.answer)
    assert order == [("1", 1), ("1", 1), ("0", 128), ("1", 128), ("0", 128)]


async def test_smaller_requests_do_not_overtake_a_large_one() -> None:
    runner = EchoRunner()
    async with running(runner) as executor:
        first = await held(runner, executor)
        pendings = [Submitted(executor, "0", layer_request([1.0] * n)) for n in (4, 8, 1)]
        runner.gate.set()
        for pending in (first, *pendings):
            await soon(pending.answer)
    assert runner.steps == [[1], [4], [8], [1]]


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"max_queue_tokens": 10}, "8 tokens of at most 10 are waiting"),
        ({"max_queue_requests": 2}, "2 requests of at most 2 are waiting"),
    ],
)
async def test_a_full_queue_refuses_until_it_has_room(limits: dict[str, int], text: str) -> None:
    runner = EchoRunner()
    async with running(runner, observer=None, **limits) as executor:
        first = await held(runner, executor)
        pendings = [Submitted(executor, "0", layer_request([1.0] * 4)) for _ in range(2)]
        with pytest.raises(QueueFullError, match=text) as caught:
            Submitted(executor, "0", layer_request([1.0] * 4))
        assert caught.value.retry_after >= 1
        runner.gate.set()
        for pending in (first, *pendings):
            await soon(pending.answer)
        await soon(Submitted(executor, "0", layer_request([1.0] * 4)).answer)


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


async def test_a_request_cancelled_in_the_queue_is_never_computed() -> None:
    runner = EchoRunner()
    async with running(runner) as executor:
        first = await held(runner, executor)
        dropped = Submitted(executor, "0", layer_request([1.0]))
        assert executor.cancel(dropped.pending, QueueTimeoutError("too late"))
        assert not executor.cancel(dropped.pending, QueueTimeoutError("twice"))
        assert not executor.cancel(first.pending, QueueTimeoutError("already started"))
        assert executor.waiting("0") == (0, 0)
        with pytest.raises(QueueTimeoutError, match="too late"):
            await soon(dropped.answer)
        runner.gate.set()
        await soon(first.answer)
        await soon(Submitted(executor, "0", layer_request([2.0])).answer)
    assert runner.steps == [[1], [1]]


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


async def test_steps_are_reported_while_the_device_computes_the_next_one() -> None:
    threads: list[str] = []

    class Noted(Observed):
        def step_done(self, *step: Any) -> None:
            threads.append(threading.current_thread().name)
            super().step_done(*step)

    runner, observed = DeviceRunner(), Noted()
    runner.gate = gate = Turnstile()
    async with running(runner, observer=observed) as executor:
        executor.set_device(0.0, leaves_cpu=True)
        pending = [Submitted(executor, "0", layer_request([0.0]))]
        assert await asyncio.to_thread(runner.entered.acquire, True, 10)
        pending.append(Submitted(executor, "0", layer_request([1.0])))
        for _ in range(2):  # a step's `wait` and its `finish` both ask
            gate.let_one_through()
        await until(lambda: len(threads) == 1)
        assert len(runner.steps) == 2
        for _ in range(2):
            gate.let_one_through()
        for request in pending:
            await soon(request.answer)
        await until(lambda: len(threads) == 2)  # no step follows
    assert threads == ["expertd-worker", "MainThread"]


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


async def test_only_the_caller_of_a_job_sees_its_exception() -> None:
    def broken() -> None:
        raise ValueError("does not fit")

    async with running(EchoRunner()) as executor:
        with pytest.raises(ValueError, match="does not fit"):
            await soon(executor.between_steps(broken))
        assert values(await soon(Submitted(executor, "0", layer_request([1.0])).answer)) == [1.0]


async def test_a_closed_executor_refuses_new_requests_and_answers_accepted_ones() -> None:
    runner = EchoRunner()
    async with running(runner) as executor:
        first = await held(runner, executor)
        second = Submitted(executor, "0", layer_request([2.0]))
        executor.close()
        with pytest.raises(ExecutorClosedError):
            Submitted(executor, "0", layer_request([3.0]))
        drained = asyncio.ensure_future(executor.drained())
        await asyncio.sleep(0)
        assert not drained.done()
        runner.gate.set()
        await soon(drained)
        assert values(first.answer.result()) == [0.0]
        assert values(second.answer.result()) == [2.0]


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
