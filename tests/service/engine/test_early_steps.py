"""When a large step begins beside a running one: at once, but late while small requests come, too."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from expertd.service.engine.executor import Executor
from expertd.service.engine.lane import StepLane
from expertd.service.moe.request import LayerRequest, StepResult
from expertd.service.settings.parts import Limits
from tests.service.engine.test_executor import Observed, soon
from tests.service.runners import EchoRunner, Submitted, layer_request
from tests.service.waiting import until

LARGE = 512
SECONDS = 0.2  # of a step

pytestmark = pytest.mark.timing


class TimedStep:
    """A step that ends at a time."""

    def __init__(self, result: StepResult, end: float) -> None:
        self._result, self._end = result, end

    def is_done(self) -> bool:
        return time.perf_counter() >= self._end

    def wait(self) -> float:
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return SECONDS

    def finish(self) -> StepResult:
        self.wait()
        return self._result


class TimedRunner(EchoRunner):
    """A device that computes steps one after another, each in SECONDS."""

    seconds = SECONDS

    def __init__(self) -> None:
        super().__init__()
        self._free = 0.0
        self.observer = Observed()
        self.early: list[float] = []  # by how much of a step each began before the device was free

    def begin(self, requests: Sequence[LayerRequest]) -> TimedStep:  # type: ignore[override]
        now = time.perf_counter()
        self.early.append(max(0.0, self._free - now) / SECONDS)
        self._free = max(now, self._free) + SECONDS
        return TimedStep(self._run(requests), self._free)


@asynccontextmanager
async def timed(**changed: int | bool) -> AsyncIterator[tuple[TimedRunner, Executor]]:
    """An executor, and its runner, of which a large step has shown what it takes."""
    runner = TimedRunner()
    limits = {
        "max_request_tokens": LARGE,
        "max_batch_tokens": 2 * LARGE - 1,
        "max_queue_tokens": 8 * LARGE,
        **changed,
    }
    executor = Executor(StepLane(Limits.model_validate(limits), runner.observer))
    executor.set_runners({"0": runner})
    executor.start()
    try:
        await soon(Submitted(executor, "0", layer_request([1.0] * LARGE)).answer)
        yield runner, executor
    finally:
        assert executor.stop(timeout=60)


def submitted(executor: Executor, *sizes: int) -> list[Submitted]:
    return [Submitted(executor, "0", layer_request([1.0] * size)) for size in sizes]


async def test_a_third_step_begins_in_the_second_half_of_the_first_one() -> None:
    """Where runners take three: the one before has its bytes by then, and these are the next to be copied."""
    async with timed() as (runner, executor):
        executor.set_max_running(3)
        for each in submitted(executor, LARGE, LARGE, LARGE, LARGE):
            await soon(each.answer)
    assert runner.early[2] > 0.8
    assert 1.05 < runner.early[3] < 1.6
    assert 1.05 < runner.early[4] < 1.6, "in the second half of the one that is the first then"


async def test_no_third_step_begins_while_small_requests_come() -> None:
    async with timed() as (runner, executor):
        executor.set_max_running(3)
        larges = submitted(executor, LARGE, LARGE, LARGE)
        await until(lambda: len(runner.steps) == 3)
        small = submitted(executor, 1)
        for each in [*larges, *small]:
            await soon(each.answer)
    assert runner.steps[3] == [LARGE, 1]
    assert runner.early[3] < 1.02


async def test_the_time_until_the_device_is_free_counts_as_waiting() -> None:
    """Not as nothing: a step's seconds are those without the step before."""
    async with timed() as (runner, executor):
        for each in submitted(executor, LARGE, LARGE):
            await soon(each.answer)
        await until(lambda: len(runner.observer.waited) == 3)
    assert runner.early[2] > 0.8, "the second one begins at once beside the first"
    waited = [seconds / SECONDS for seconds in runner.observer.waited[1:]]
    assert waited[0] < 0.5
    assert waited[1] > 0.8


@pytest.mark.parametrize("chunk", [0, LARGE - 64])
async def test_joining_a_small_request_overtakes_large_ones(chunk: int) -> None:
    """The step after the one that runs has room for it, whether requests are computed whole or in chunks."""
    settings = {"join_chunks": True, "prefill_chunk_tokens": chunk, "max_batch_tokens": LARGE + 8}
    async with timed(**settings) as (runner, executor):
        await asyncio.sleep(SECONDS)  # the large request before does not compete with what comes now
        await soon(submitted(executor, 1)[0].answer)
        larges = submitted(executor, LARGE)
        await until(lambda: len(runner.steps) == 3)  # it is computed whole: no other was there
        larges += submitted(executor, LARGE, LARGE)
        await asyncio.sleep(0.2 * SECONDS)
        small = submitted(executor, 1)
        for each in [*larges, *small]:
            await soon(each.answer)
    assert [sorted(step)[0] for step in runner.steps[2:4]] == [LARGE, 1]
    assert len(runner.steps[3]) == 2
