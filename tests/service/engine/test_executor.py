"""The executor alone: steps of whole requests and of chunks, those that fail, and callers that leave."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar

import numpy as np
import pytest

from expertd.service.engine.chunks import part_of
from expertd.service.engine.errors import (
    QueueFullError,
    QueueTimeoutError,
    RequestRefusedError,
    SomeRefusedError,
    StepFailedError,
)
from expertd.service.engine.executor import Executor
from expertd.service.engine.lane import StepLane
from expertd.service.memory import Span, host_view
from expertd.service.moe.request import LayerRequest, OutputMemory, Signal, StepPlan, StepResult
from expertd.service.settings.parts import Limits
from tests.service.runners import Computed, EchoRunner, Submitted, Turnstile, layer_request
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
        assert executor.stop(timeout=60)


async def held(runner: EchoRunner, executor: Executor, model: str = "0") -> Submitted:
    """A request whose step waits at the runner's gate."""
    runner.gate.clear()
    pending = Submitted(executor, model, layer_request([0.0]))
    assert await asyncio.to_thread(runner.entered.acquire, True, 60)
    return pending


async def soon(answer: Awaitable[T]) -> T:
    """The answer, after one more iteration of the loop, which wait_for does not run from Python 3.12 on."""
    result = await asyncio.wait_for(answer, 60)
    await asyncio.sleep(0)
    return result


def values(answer: OutputMemory) -> list[float]:
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


async def test_an_observer_that_raises_does_not_prevent_answers(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Observed):
        def step_done(self, *_: Any) -> None:
            raise RuntimeError("no metrics today")

    async with running(EchoRunner(), observer=Broken()) as executor:
        assert values(await soon(Submitted(executor, "0", layer_request([1.0])).answer)) == [1.0]
    await until(lambda: "no metrics today" in caplog.text)


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


LONG = [float(i) for i in range(1, 33)]


def chunking(runner: EchoRunner, observer: Observed | None = None) -> AbstractAsyncContextManager[Executor]:
    """An executor with chunks of 8 tokens."""
    limits = {"max_request_tokens": 32, "max_batch_tokens": 32, "prefill_chunk_tokens": 8}
    return running(runner, observer=observer, **limits)


async def next_step(runner: EchoRunner, gate: Turnstile) -> None:
    """Let the step at the gate end, and wait for the next one."""
    gate.let_one_through()
    assert await asyncio.to_thread(runner.entered.acquire, True, 60)


async def in_chunks(runner: EchoRunner, executor: Executor, request: LayerRequest) -> Submitted:
    """A long request that will be computed in chunks, behind a request whose step is running."""
    await held(runner, executor)
    long = Submitted(executor, "0", request)
    Submitted(executor, "0", layer_request([0.0]))
    return long


def span(array: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> Span:
    return Span(array.ctypes.data, array.nbytes, None, array.data.cast("B"), array)


async def test_a_request_in_chunks_is_answered_once_with_all_of_its_output() -> None:
    runner, observed = EchoRunner(), Observed()
    async with chunking(runner, observed) as executor:
        long = await in_chunks(runner, executor, layer_request(LONG))
        runner.gate.set()
        assert values(await soon(long.answer)) == LONG
        await soon(executor.drained())
    assert runner.steps == [[1], [1], [8], [8], [8], [8]]
    assert long.pending.compute_seconds == pytest.approx(4 * runner.seconds)
    assert observed.done == [("0", 1)] * 3 + [("0", 0)] * 3, "it counts in its first step"


async def test_a_request_that_is_cancelled_between_chunks_is_not_computed_further() -> None:
    runner = EchoRunner()
    runner.gate = gate = Turnstile()
    async with chunking(runner) as executor:
        first = Submitted(executor, "0", layer_request([0.0]))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        long, other = (Submitted(executor, "0", layer_request(tokens)) for tokens in (LONG, [0.0]))
        for _ in range(3):
            await next_step(runner, gate)
        assert executor.waiting("0") == (1, 16), "the second chunk is being computed"
        assert executor.cancel(long.pending, QueueTimeoutError("too late"))
        assert not executor.cancel(long.pending, QueueTimeoutError("twice"))
        assert executor.waiting("0") == (0, 0)
        await asyncio.sleep(0)
        assert not long.answer.done(), "the step still uses its memory"
        gate.set()
        with pytest.raises(QueueTimeoutError, match="too late"):
            await soon(long.answer)
        for each in (first, other):
            await soon(each.answer)
        await soon(executor.drained())
    assert runner.steps == [[1], [1], [8], [8]]


async def test_a_request_is_not_cancelled_once_its_last_chunk_has_begun() -> None:
    runner = EchoRunner()
    runner.gate = gate = Turnstile()
    async with chunking(runner) as executor:
        Submitted(executor, "0", layer_request([0.0]))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        long = Submitted(executor, "0", layer_request(LONG[:16]))
        Submitted(executor, "0", layer_request([0.0]))
        for _ in range(3):
            await next_step(runner, gate)
        assert not executor.cancel(long.pending, QueueTimeoutError("too late"))
        gate.set()
        assert values(await soon(long.answer)) == LONG[:16]


async def test_a_chunk_that_fails_fails_its_request_alone(caplog: pytest.LogCaptureFixture) -> None:
    runner, observed = EchoRunner(poison=9.0), Observed()
    async with chunking(runner, observed) as executor:
        with caplog.at_level("CRITICAL"):
            long = await in_chunks(runner, executor, layer_request(LONG))  # its second chunk begins with 9
            other = Submitted(executor, "0", layer_request([5.0] * 8))
            runner.gate.set()
            with pytest.raises(StepFailedError, match="the step failed: RuntimeError"):
                await soon(long.answer)
            assert values(await soon(other.answer)) == [5.0] * 8
            await soon(executor.drained())
    assert runner.steps == [[1], [1, 8], [8], [8]]
    assert observed.failed == [1]


@pytest.mark.parametrize("ids_datatype", ["INT32", "INT64"])
@pytest.mark.parametrize("datatype", ["BF16", "FP16", "FP32"])
def test_a_part_has_its_rows_of_every_tensor(datatype: str, ids_datatype: str) -> None:
    element, wide = (4 if datatype == "FP32" else 2), (8 if ids_datatype == "INT64" else 4)
    out = np.zeros(6 * 3, np.float32)
    request = LayerRequest(
        6, _counted(6, 3 * element), datatype, _counted(6, 2 * wide), ids_datatype, _counted(6, 2 * 4),
        "FP32", span(out), Signal(1, 2), plan=StepPlan(None, None, "kept"),
    )  # fmt: skip
    part = part_of(request, 2, 3)
    sizes = ((part.hidden_states, 3 * element), (part.topk_ids, 2 * wide), (part.topk_weights, 8))
    for rows, size in sizes:
        assert isinstance(rows, memoryview)
        assert bytes(rows) == b"".join(bytes([row]) * size for row in (2, 3, 4))
    assert part.output is not None
    assert part.output.view is not None
    assert (part.output.address, part.output.num_bytes) == (out.ctypes.data + 24, 36)
    part.output.view[:] = b"\1" * 36
    assert (out != 0).nonzero()[0].tolist() == list(range(6, 15))
    assert (part.num_tokens, part.datatype, part.topk_ids_datatype) == (3, datatype, ids_datatype)
    assert part.signal is None, "the device would announce an output that is not complete"
    assert part.plan is None


def _counted(rows: int, row_bytes: int) -> bytes:
    return b"".join(bytes([row]) * row_bytes for row in range(rows))


class FakeCalls:
    """As calls of GPUs; `said` is what the worker thread has said, and `steps` has what it did between."""

    def __init__(self, said: list[str]) -> None:
        self.said, self.are_made = said, True
        self.is_started = False
        self.num_holds = 0

    def start(self) -> bool:
        if self.num_holds:
            self.run()
            return False
        if not self.is_started:
            self.said.append("start")
        self.is_started = True
        return True

    def hold(self) -> None:
        self.num_holds += 1

    def let_go(self) -> None:
        self.num_holds -= 1

    def stop(self) -> None:
        if self.is_started:
            self.said.append("stop")
        self.is_started = False

    def run(self) -> None:
        self.stop()
        self.said.append("run")


class SayingRunner(EchoRunner):
    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said

    def begin(self, requests: Sequence[LayerRequest]) -> Any:
        self.said.append("step")
        return super().begin(requests)


async def test_calls_of_gpus_have_the_device_while_nothing_else_runs() -> None:
    """They stop for a step, before which those that are there have their turn, and for a job."""
    said: list[str] = []
    executor = Executor(StepLane(Limits(), Observed()))
    executor.set_runners({"0": SayingRunner(said)})
    executor.answer_calls(FakeCalls(said))
    executor.start()
    await until(lambda: said == ["start"])
    for alone in (False, True):  # the event loop does not run the step then
        said.clear()
        pending = Submitted(executor, "0", layer_request([1.0]), alone=alone)
        assert values(await soon(pending.answer)) == [1.0]
        await until(lambda: said == ["stop", "run", "step", "start"])
    said.clear()
    await executor.between_steps(lambda: said.append("job"))
    await until(lambda: said == ["stop", "job", "start"])
    assert executor.stop(timeout=60)
    assert said[-1] == "stop"


async def test_calls_of_gpus_are_answered_in_turns_while_they_are_held() -> None:
    """By a thread that needs the device for moments: the graph never runs on; then it does again."""
    said: list[str] = []
    calls = FakeCalls(said)
    executor = Executor(StepLane(Limits(), Observed()))
    executor.set_runners({"0": SayingRunner(said)})
    executor.answer_calls(calls)
    executor.start()
    await until(lambda: said == ["start"])
    is_held, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        with executor.pausing_calls():
            assert not calls.is_started
            is_held.set()
            assert may_end.wait(60)

    holding = asyncio.create_task(asyncio.to_thread(hold))
    assert await asyncio.to_thread(is_held.wait, 60)
    await until(lambda: said.count("run") >= 5)
    answer = Submitted(executor, "0", layer_request([1.0])).answer
    assert values(await soon(answer)) == [1.0]
    assert said.count("start") == 1
    may_end.set()
    await holding
    await until(lambda: said[-1] == "start")
    assert executor.stop(timeout=60)
