"""The worker thread's wait: sources are polled when they ring, whether it sleeps, spins or works."""

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from expertd.service.engine.executor import Executor
from expertd.service.engine.lane import StepLane
from expertd.service.engine.steps import Submission
from expertd.service.engine.wakeup import RequestSource, Wakeup
from expertd.service.moe.request import LayerRequest, OutputMemory, StepResult
from expertd.service.settings.parts import Limits
from tests.service.engine.test_executor import Observed
from tests.service.runners import DeviceRunner, EchoRunner, layer_request
from tests.service.waiting import until


class Bell:
    """A source that submits a request for each value written to it."""

    lane = 0

    def __init__(self, submit: Callable[[float], object] = lambda _: None) -> None:
        self._fd = os.eventfd(0)
        self._values: deque[float] = deque()
        self._submit = submit
        self.announced = self.taken = 0

    def fileno(self) -> int:
        return self._fd

    def poll(self) -> None:
        with suppress(IndexError):  # another thread may poll, too
            while True:
                self._submit(self._values.popleft())
                self.taken += 1

    def is_awaited(self) -> bool:
        return self.announced > self.taken

    def has_arrived(self) -> bool:
        return bool(self._values)

    def announce(self) -> None:
        """The next request will come without a ring."""
        self.announced = self.taken + 1
        os.eventfd_write(self._fd, 1)

    def arrive(self, value: float) -> None:
        """It has come."""
        self._values.append(value)

    def ring(self, *values: float) -> None:
        """One request of 0.0, or one for each value, which whoever polls finds together."""
        self._values.extend(values or (0.0,))
        os.eventfd_write(self._fd, 1)

    def close(self) -> None:
        os.close(self._fd)


@asynccontextmanager
async def belled(
    runner: EchoRunner, observer: Observed, spin_seconds: float = 0.0
) -> AsyncIterator[tuple[Executor, Bell, list[OutputMemory | Exception]]]:
    """An executor with one source, and the answers to its requests."""
    executor = Executor(StepLane(Limits(), observer, spin_seconds))
    executor.set_runners({"0": runner})
    answers: list[OutputMemory | Exception] = []
    bell = Bell(
        lambda value: executor.submit(Submission("0", layer_request([value]), answers.append, on_worker=True))
    )
    executor.add_source(bell)
    executor.start()
    try:
        yield executor, bell, answers
    finally:
        executor.remove_source(bell)
        bell.close()
        runner.gate.set()
        assert executor.stop(timeout=60)


@pytest.mark.parametrize("spin_seconds", [0.0, 50e-6])
async def test_announced_requests_need_no_ring(spin_seconds: float) -> None:
    """They come when their caller's GPU has written them: at once, or long after the thread would sleep."""
    async with belled(EchoRunner(), Observed(), spin_seconds) as (executor, bell, answers):
        for count in range(1, 31):
            bell.announce()
            if count % 3 == 0:
                await asyncio.sleep(2e-3)
            bell.arrive(float(count))
            await until(lambda count=count: len(answers) == count)  # type: ignore[misc]
        await until(lambda: executor.lanes[0].is_asleep)


@pytest.mark.parametrize("spin_seconds", [0.0, 50e-6, 0.1])
async def test_every_ring_is_heard(spin_seconds: float) -> None:
    observed = Observed()
    async with belled(EchoRunner(), observed, spin_seconds) as (_, bell, answers):
        for count in range(1, 301):
            bell.ring(float(count))
            while count % 3 == 0 and len(answers) < count:
                await asyncio.sleep(0)
        await until(lambda: sum(requests for _, requests in observed.done) == 300)


async def test_a_source_and_the_event_loop_share_a_step() -> None:
    runner = EchoRunner()
    async with belled(runner, Observed()) as (executor, bell, answers):
        runner.gate.clear()
        bell.ring()
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        bell.ring()
        others: list[OutputMemory | Exception] = []
        executor.submit(Submission("0", layer_request([0.0] * 2), others.append))
        runner.gate.set()
        await until(lambda: len(answers) == 2 and len(others) == 1)
        await asyncio.wait_for(executor.drained(), 60)
    assert runner.steps == [[1], [2, 1]]


async def test_what_arrives_during_a_job_is_read_at_once() -> None:
    """So that its timeout begins."""
    begun, goes_on = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        assert goes_on.wait(60)

    async with belled(EchoRunner(), Observed()) as (executor, bell, answers):
        done = executor.do_between_steps(job)
        assert await asyncio.to_thread(begun.wait, 60)
        bell.ring()
        try:
            await until(lambda: executor.waiting("0") == (1, 1))
        finally:
            goes_on.set()
        await asyncio.wrap_future(done)
        await until(lambda: len(answers) == 1)


class Slow(EchoRunner):
    """An echo that says that its steps take long."""

    def _run(self, requests: Sequence[LayerRequest]) -> StepResult:
        return replace(super()._run(requests), compute_seconds=1e6)


async def two_in_a_step(bell: Bell, answers: list[OutputMemory | Exception]) -> None:
    """Run a step with one request, and then one with two.

    They come after the first answer: a request that is seen during a step is nobody's who returns.
    """
    bell.ring()
    await until(lambda: len(answers) == 1)
    bell.ring(0.0, 0.0)
    await until(lambda: len(answers) == 3)


async def test_the_callers_of_a_step_meet_again_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expertd.service.engine.stepping._MAX_REJOIN_SECONDS", 30.0)
    runner = Slow()
    async with belled(runner, Observed()) as (executor, bell, answers):
        await two_in_a_step(bell, answers)
        bell.ring()
        await until(lambda: executor.waiting("0")[0] == 1)
        assert len(runner.steps) == 2, "it waits for the other one"
        bell.ring()
        await until(lambda: len(answers) == 5)
    assert runner.steps == [[1], [1, 1], [1, 1]]


async def test_a_caller_that_does_not_return_delays_the_others_only_briefly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("expertd.service.engine.stepping._MAX_REJOIN_SECONDS", 0.05)
    runner = Slow()
    async with belled(runner, Observed()) as (_, bell, answers):
        await two_in_a_step(bell, answers)
        bell.ring()
        await until(lambda: len(answers) == 4)
    assert runner.steps == [[1], [1, 1], [1]]


async def test_reports_do_not_wait_for_a_thread_that_stays_awake_for_long() -> None:
    observed = Observed()
    async with belled(DeviceRunner(), observed, spin_seconds=3600.0) as (executor, bell, answers):
        executor.set_device(3600.0, leaves_cpu=True)
        bell.ring()
        await until(lambda: len(answers) == 1 and len(observed.done) == 1)


def test_a_removed_source_is_not_polled() -> None:
    wakeup, bell = Wakeup(), Bell()
    wakeup.add(bell)
    other = os.dup(bell.fileno())  # as its caller has one
    wakeup.remove(bell)
    bell.close()
    os.eventfd_write(other, 1)
    assert wakeup.wait(0) is None
    assert not wakeup.sources
    os.close(other)
    wakeup.close()


def test_many_sources_that_ring_at_once_are_all_heard() -> None:
    wakeup, bells = Wakeup(), [Bell() for _ in range(150)]
    for bell in bells:
        wakeup.add(bell)
        bell.ring()
    rang = list[RequestSource]()
    while found := wakeup.wait(0):
        rang += found
    assert sorted(map(id, rang)) == sorted(map(id, bells))
    wakeup.close()
    for bell in bells:
        bell.close()
