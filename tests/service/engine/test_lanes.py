"""Two lanes: short and long requests in queues of their own, whose steps run at the same time, and load."""

import asyncio
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import numpy as np
import pytest

from expertd.service.engine.errors import (
    EngineError,
    ExecutorClosedError,
    QueueFullError,
    QueueTimeoutError,
    StepFailedError,
)
from expertd.service.engine.executor import Executor, executor_of
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.steps import Submission
from expertd.service.memory import host_view
from expertd.service.moe.request import LayerRequest, OutputMemory, StepResult
from tests.service.apps import tiny_settings
from tests.service.engine.test_wakeup import Bell
from tests.service.runners import DeviceRunner, EchoRunner, Submitted, layer_request
from tests.service.waiting import until

LANES = {"decode_max_tokens": 2, "decode_batch_tokens": 4}
LIMITS = {"max_request_tokens": 16, "max_batch_tokens": 16, "max_queue_tokens": 32}


class Pair:
    """Lanes with a runner each."""

    def __init__(self, executor: Executor, decode: EchoRunner, prefill: EchoRunner) -> None:
        self.executor, self.decode, self.prefill = executor, decode, prefill

    def send(self, num_tokens: int, value: float = 1.0, priority: int = 128) -> Submitted:
        return Submitted(self.executor, "tiny", layer_request([value] * num_tokens), priority=priority)

    async def held(self, runner: EchoRunner) -> Submitted:
        """A request whose step waits at the runner's gate."""
        runner.gate.clear()
        while runner.entered.acquire(blocking=False):
            pass  # of earlier steps
        pending = self.send(1 if runner is self.decode else 8)
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        return pending


@pytest.fixture(params=["a thread each", "one thread"])
def one_thread(request: pytest.FixtureRequest) -> bool:
    """Whether both lanes have one thread, as on a GPU."""
    return bool(request.param == "one thread")


@asynccontextmanager
async def running(
    metrics: Metrics | None = None, one_thread: bool = False, **limits: int
) -> AsyncIterator[Pair]:
    settings = tiny_settings({**LIMITS, **limits}, lanes=LANES)
    metrics = metrics or Metrics("0")
    metrics.add_models({model.name: model.shape for model in settings.models}, 4, ["decode", "prefill"])
    executor = executor_of(settings, metrics)
    assert len(executor.lanes) == 2
    kind = DeviceRunner if one_thread else EchoRunner
    runners = kind(), kind()
    executor.set_runners(*({"tiny": runner} for runner in runners))
    executor.start()
    executor.set_device(1e-3 if one_thread else 0.0, leaves_cpu=one_thread)
    try:
        yield Pair(executor, *runners)
    finally:
        for runner in runners:
            runner.gate.set()
        assert await asyncio.to_thread(executor.stop, 10)
        assert not executor.running


async def answered(*pendings: Submitted) -> None:
    await asyncio.wait_for(asyncio.gather(*(pending.answer for pending in pendings)), 60)


@pytest.mark.parametrize(("busy", "sizes"), [("prefill", [1, 2]), ("decode", [3, 16])])
async def test_requests_are_answered_while_a_step_of_the_other_lane_runs(
    busy: str, sizes: list[int], one_thread: bool
) -> None:
    async with running(one_thread=one_thread) as pair:
        runner, other = getattr(pair, busy), pair.decode if busy == "prefill" else pair.prefill
        first = await pair.held(runner)
        await answered(*map(pair.send, sizes))
        assert not first.answer.done()
        assert pair.executor.unanswered == 1
        runner.gate.set()
        await answered(first)
    assert len(runner.steps) == 1
    assert sorted(size for step in other.steps for size in step) == sizes


async def test_each_worker_thread_reads_the_source_of_its_lane() -> None:
    """While both are awake; every ring is heard, whether a thread is awake, asleep, or between both."""
    async with running() as pair:
        readers: dict[int, list[str]] = {1: [], 8: []}
        answers: list[object] = []

        def submit(value: float) -> None:
            num_tokens = int(value)
            readers[num_tokens].append(threading.current_thread().name)
            request = layer_request([1.0] * num_tokens)
            bells[num_tokens].lane = pair.executor.submit(
                Submission("tiny", request, answers.append, on_worker=True)
            ).lane

        bells = {num_tokens: Bell(submit) for num_tokens in readers}
        for bell in bells.values():
            pair.executor.add_source(bell)
        for count in range(1, 401):
            for num_tokens, bell in bells.items():
                bell.ring(num_tokens)
            some = 2 * count - random.randrange(4)  # the queues have room for four
            while len(answers) < some:
                await asyncio.sleep(0)
        await until(lambda: len(answers) == 800)
        # The event loop reads, too, while a step is not known to be short: the first one, or a slow one.
        assert "expertd-worker" in readers[1]
        assert "expertd-worker-1" not in readers[1]
        assert "expertd-worker-1" in readers[8]
        for bell in bells.values():
            pair.executor.remove_source(bell)
            bell.close()


@pytest.mark.parametrize("num_tokens", [1, 8])
async def test_reports_of_each_lane_need_no_further_request(num_tokens: int, one_thread: bool) -> None:
    async with running(one_thread=one_thread) as pair:
        reported: list[int] = []

        def done(_: object) -> None:
            pair.executor.report_later(lambda: reported.append(num_tokens))

        pair.executor.submit(Submission("tiny", layer_request([1.0] * num_tokens), done, on_worker=True))
        await until(lambda: bool(reported))


async def test_a_job_of_the_first_thread_waits_for_the_steps_of_both_lanes_there() -> None:
    """As the start of the profiler, which takes seconds: they would be answered late, and look slow."""
    async with running(one_thread=True) as pair:
        held = await pair.held(pair.prefill)
        done = pair.executor.do_between_steps(lambda: pair.executor.lanes[1].is_running)
        await asyncio.sleep(0.05)
        assert not done.done()
        pair.prefill.gate.set()
        assert not await asyncio.wrap_future(done)
        await held.answer


async def test_steps_of_each_lane_have_its_limits_and_priorities(one_thread: bool) -> None:
    async with running(one_thread=one_thread, prefill_chunk_tokens=0) as pair:
        first = await pair.held(pair.decode), await pair.held(pair.prefill)
        others = [pair.send(2, priority=priority) for priority in (128, 128, 7)]
        others += [pair.send(count, priority=priority) for count, priority in ((8, 128), (16, 7), (8, 128))]
        assert pair.executor.waiting("tiny") == (6, 38)
        for runner in (pair.decode, pair.prefill):
            runner.gate.set()
        await answered(*first, *others)
    assert pair.decode.steps == [[1], [2, 2], [2]], "steps of at most decode_batch_tokens"
    assert pair.prefill.steps == [[8], [16], [8, 8]], "the urgent one first"


async def test_a_full_queue_of_one_lane_leaves_the_other_open(one_thread: bool) -> None:
    async with running(one_thread=one_thread) as pair:
        first = await pair.held(pair.prefill)
        others = [pair.send(16), pair.send(16)]
        with pytest.raises(QueueFullError, match="32 tokens of at most 32 are waiting"):
            pair.send(3)
        with pytest.raises(QueueFullError):
            pair.executor.check_capacity("tiny", 3)
        pair.executor.check_capacity("tiny", 2)  # or more
        await answered(pair.send(2))
        short = await pair.held(pair.decode)
        shorts = [pair.send(2) for _ in range(16)]
        for count in (1, 2, 3):
            with pytest.raises(QueueFullError, match="32 tokens of at most 32 are waiting"):
                pair.executor.check_capacity("tiny", count)
        pair.prefill.gate.set()
        pair.decode.gate.set()
        await answered(first, short, *others, *shorts)


async def test_requests_are_cancelled_on_their_lane(one_thread: bool) -> None:
    async with running(one_thread=one_thread) as pair:
        first = await pair.held(pair.decode), await pair.held(pair.prefill)
        others = [pair.send(count) for count in (2, 8, 1, 9)]
        for begun in first:
            assert not pair.executor.cancel(begun.pending, QueueTimeoutError("begun"))
        for pending in others[:2]:
            assert pair.executor.cancel(pending.pending, QueueTimeoutError("late"))
            assert not pair.executor.cancel(pending.pending, QueueTimeoutError("late"))
            with pytest.raises(QueueTimeoutError):
                await pending.answer
        pair.decode.gate.set()
        pair.prefill.gate.set()
        await answered(*first, *others[2:])
    assert (pair.decode.steps, pair.prefill.steps) == ([[1], [1]], [[8], [9]])


@pytest.mark.parametrize("busy", ["decode", "prefill"])
async def test_a_job_runs_while_no_step_of_any_lane_does(busy: str, one_thread: bool) -> None:
    async with running(one_thread=one_thread) as pair:
        runner = getattr(pair, busy)
        first = await pair.held(runner)
        other = pair.prefill if busy == "decode" else pair.decode

        def look() -> tuple[int, int, bool]:
            return len(runner.steps), len(other.steps), any(lane.is_running for lane in pair.executor.lanes)

        job = asyncio.ensure_future(pair.executor.between_steps(look))
        await asyncio.sleep(0)  # until it is queued
        later = pair.send(2), pair.send(8)
        await until(lambda: len(other.steps) + pair.executor.waiting("tiny")[0] == 2)
        assert not job.done()
        runner.gate.set()
        of_runner, of_other, runs = await asyncio.wait_for(job, 60)
        assert (of_runner, runs) == (1, False)
        assert not of_other or one_thread, "it may begin steps until the job does"
        await answered(first, *later)


async def test_jobs_run_one_after_another_and_only_their_caller_sees_an_exception(one_thread: bool) -> None:
    def broken() -> None:
        raise ValueError("does not fit")

    async with running(one_thread=one_thread) as pair:
        jobs = [pair.executor.between_steps(job) for job in (lambda: 1, broken, lambda: 3)]
        one, two, three = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 60)
        assert (one, three) == (1, 3)
        assert isinstance(two, ValueError)
        await answered(pair.send(1), pair.send(8))


async def test_stopping_ends_jobs_that_wait(one_thread: bool) -> None:
    async with running(one_thread=one_thread) as pair:
        first = await pair.held(pair.prefill)
        job = asyncio.ensure_future(pair.executor.between_steps(lambda: None))
        await asyncio.sleep(0)
        stopping = asyncio.create_task(asyncio.to_thread(pair.executor.stop, 10))
        await until(lambda: any(lane.has_ended for lane in pair.executor.lanes))
        pair.prefill.gate.set()
        assert await stopping
        await asyncio.wait({job}, timeout=10)
        assert job.done()
        await answered(first)
        with pytest.raises(ExecutorClosedError):
            await pair.executor.between_steps(lambda: None)


async def test_cancel_all_and_give_up_reach_both_lanes(one_thread: bool) -> None:
    async with running(one_thread=one_thread) as pair:
        first = await pair.held(pair.decode), await pair.held(pair.prefill)
        others = pair.send(2), pair.send(9)
        pair.executor.cancel_all()
        for pending in others:
            with pytest.raises(ExecutorClosedError):
                await pending.answer
        pair.executor.give_up(QueueTimeoutError("the device hangs"))
        for pending in first:
            with pytest.raises(QueueTimeoutError):
                await pending.answer


@pytest.mark.parametrize("number", [0, 1])
async def test_deferred_calls_are_done_before_a_job(number: int, one_thread: bool) -> None:
    """They wake callers whose answers are there, and a job may take long."""
    order: list[str] = []
    async with running(one_thread=one_thread) as pair:

        def done(_: object) -> None:
            order.append("answer")
            pair.executor.defer(partial(order.append, "call"))

        runner = (pair.decode, pair.prefill)[number]
        runner.gate.clear()
        pair.executor.submit(Submission("tiny", layer_request([1.0] * (1, 8)[number]), done, on_worker=True))
        assert await asyncio.to_thread(runner.entered.acquire, True, 60)
        job = asyncio.ensure_future(pair.executor.between_steps(partial(order.append, "job")))
        await asyncio.sleep(0)
        runner.gate.set()
        await asyncio.wait_for(job, 60)
    assert order == ["answer", "call", "job"]


async def test_deferred_calls_do_not_pile_up_while_one_step_follows_the_other(one_thread: bool) -> None:
    left, most, answers = 0, 0, 0
    all_done = threading.Event()
    async with running(one_thread=one_thread) as pair:

        def call() -> None:
            nonlocal left
            left -= 1

        def send() -> None:
            pair.executor.submit(Submission("tiny", layer_request([1.0] * 16), done, on_worker=True))

        def done(_: object) -> None:
            nonlocal left, most, answers
            left, answers = left + 1, answers + 1
            most = max(most, left)
            pair.executor.defer(call)
            if answers < 200:
                send()
            elif answers == 201:
                all_done.set()

        for _ in range(2):  # one waits while the other is computed
            send()
        assert await asyncio.to_thread(all_done.wait, 60)
    assert left == 0
    assert most <= 10


async def test_steps_are_counted_by_lane(one_thread: bool) -> None:
    metrics = Metrics("0")

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"expertd_{name}", {"model": "tiny", **labels})

    async with running(metrics, one_thread=one_thread) as pair:
        assert value("lane_compute_seconds_count", lane="prefill") == 0
        await answered(pair.send(2), pair.send(8))
        await until(lambda: value("lane_tokens_total", lane="prefill") == 8)
        await until(lambda: value("lane_tokens_total", lane="decode") == 2)
        for name in ("lane_compute_seconds_count", "lane_queue_seconds_count"):
            assert [value(name, lane=lane) for lane in ("decode", "prefill")] == [1, 1]
        assert value("queue_seconds_count") == 2


SECONDS = 0.6
POISON, POISONED = -7.0, 97  # what each request has whose number this divides
MANY_SIZES = (1, 1, 2, 3, 8, 16)


class TimedStep:
    """A step that is over at a time, if nobody waits for it, too."""

    def __init__(self, end: float, compute: partial[StepResult]) -> None:
        self._end, self._compute = end, compute

    def is_done(self) -> bool:
        return time.perf_counter() >= self._end

    def wait(self) -> float:
        time.sleep(max(0.0, self._end - time.perf_counter()))
        self._compute()  # raises if it is to fail
        return EchoRunner.seconds

    def finish(self) -> StepResult:
        self.wait()
        return self._compute()


class TimedRunner(EchoRunner):
    """An echo whose steps, one after another, take 0.05 to 3 ms without the CPU."""

    _free = 0.0

    def begin(self, requests: Sequence[LayerRequest]) -> TimedStep:  # type: ignore[override]
        self._free = max(self._free, time.perf_counter()) + random.uniform(0.05e-3, 3e-3)
        return TimedStep(self._free, partial(self._result, requests))


class Sender:
    """Sends requests with their number in each token, and keeps the answers by it."""

    def __init__(self, lanes: Executor) -> None:
        self._lanes = lanes
        self._numbers = count(1)  # from any thread
        self.sizes: dict[int, int] = {}
        self.answers: defaultdict[int, list[OutputMemory | Exception]] = defaultdict(list)

    def send(self, on_worker: bool = False) -> int:
        """The number of a new request."""
        number = next(self._numbers)
        self.sizes[number] = random.choice(MANY_SIZES)
        value = float(number if number % POISONED else POISON)
        request = layer_request([value] * self.sizes[number])
        timeout = random.choice([None, None, None, 2e-3, 1.0])
        priority = random.choice([1, 128, 200])
        keep = self.answers[number].append
        try:
            pending = self._lanes.submit(
                Submission(
                    "tiny",
                    request,
                    keep,
                    on_worker=on_worker,
                    alone=not on_worker,
                    priority=priority,
                    timeout=timeout,
                )
            )
        except EngineError as error:
            keep(error)
            return number
        if random.random() < 0.1:
            self._lanes.cancel(pending, QueueTimeoutError("cancelled"))
        return number

    def is_answered(self, number: int) -> bool:
        """Whether there is an answer."""
        return bool(self.answers[number])

    def outcomes(self) -> Counter[str]:
        """How many requests had each outcome."""
        return Counter(self._outcome(number) for number in self.sizes)

    def _outcome(self, number: int) -> str:
        answers = self.answers[number]
        if len(answers) != 1:
            return f"{len(answers)} answers"
        if isinstance(answers[0], Exception):
            may_fail = number % POISONED == 0 or not isinstance(answers[0], StepFailedError)
            return "refused" if may_fail else "failed"
        values = np.frombuffer(host_view(answers[0]), np.float32)
        return "right" if values.tolist() == [number] * self.sizes[number] else "wrong"


@pytest.mark.parametrize("one_thread", [False, True])
@pytest.mark.parametrize("spin_seconds", [0.0, 1e-3])
async def test_every_request_is_answered_once_and_rightly(one_thread: bool, spin_seconds: float) -> None:
    limits = {"max_request_tokens": 16, "max_batch_tokens": 16, "prefill_chunk_tokens": 4}
    settings = tiny_settings(limits, lanes={"decode_max_tokens": 2, "decode_batch_tokens": 8})
    metrics = Metrics("0")
    metrics.add_models({model.name: model.shape for model in settings.models}, 4, ["decode", "prefill"])
    lanes = executor_of(settings, metrics)
    assert len(lanes.lanes) == 2
    lanes.set_runners(*({"tiny": TimedRunner(POISON)} for _ in lanes.lanes))
    lanes.start()
    lanes.set_device(spin_seconds, leaves_cpu=one_thread)
    sender = Sender(lanes)
    bells = [Bell(lambda _: sender.send(on_worker=True)) for _ in range(4)]
    for bell in bells:
        lanes.add_source(bell)
    end = time.monotonic() + SECONDS

    async def call() -> None:
        while time.monotonic() < end:
            number = sender.send()
            await until(partial(sender.is_answered, number))
            await asyncio.sleep(random.choice([0, 0, 1e-3, 20e-3]))

    async def ring() -> None:
        while time.monotonic() < end:
            random.choice(bells).ring()
            await asyncio.sleep(random.choice([0, 0.2e-3, 1e-3, 5e-3, 20e-3]))

    def look() -> None:
        assert not any(lane.is_running for lane in lanes.lanes)

    async def work_between_steps() -> None:
        while time.monotonic() < end:
            await asyncio.wait_for(lanes.between_steps(look), 60)
            await asyncio.sleep(random.choice([0, 1e-3, 50e-3]))

    await asyncio.gather(*(call() for _ in range(4)), *(ring() for _ in range(4)), work_between_steps())
    await until(lambda: all(map(sender.is_answered, list(sender.sizes))))
    lanes.close()
    await asyncio.wait_for(lanes.drained(), 60)
    assert await asyncio.to_thread(lanes.stop, 10)
    for bell in bells:
        bell.close()
    outcomes = sender.outcomes()
    assert set(outcomes) == {"right", "refused"}
