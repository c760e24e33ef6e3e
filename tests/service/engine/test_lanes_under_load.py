"""Both lanes at once, with all that may happen to requests: each is answered once, and rightly."""

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import count

import numpy as np
import pytest

from expertd.service.engine.errors import EngineError, QueueTimeoutError, StepFailedError
from expertd.service.engine.executor import Executor, executor_of
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.steps import Submission
from expertd.service.memory import host_view
from expertd.service.moe.request import LayerRequest, Output, StepResult
from tests.service.apps import tiny_settings
from tests.service.engine.test_wakeup import Bell
from tests.service.runners import EchoRunner, layer_request
from tests.service.waiting import until

SECONDS = 0.6
POISON, POISONED = -7.0, 97  # what each request has whose number this divides
SIZES = (1, 1, 2, 3, 8, 16)


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
        self.answers: defaultdict[int, list[Output | Exception]] = defaultdict(list)

    def send(self, on_worker: bool = False) -> int:
        """The number of a new request."""
        number = next(self._numbers)
        self.sizes[number] = random.choice(SIZES)
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
            await asyncio.wait_for(lanes.between_steps(look), 10)
            await asyncio.sleep(random.choice([0, 1e-3, 50e-3]))

    await asyncio.gather(*(call() for _ in range(4)), *(ring() for _ in range(4)), work_between_steps())
    await until(lambda: all(map(sender.is_answered, list(sender.sizes))))
    lanes.close()
    await asyncio.wait_for(lanes.drained(), 10)
    assert await asyncio.to_thread(lanes.stop, 10)
    for bell in bells:
        bell.close()
    outcomes = sender.outcomes()
    assert set(outcomes) == {"right", "refused"}
