"""Lanes: short and long requests in queues of their own, whose steps run at the same time.

Each lane is a `Scheduler`. On a GPU, one thread runs the steps of both (see `worker`). On a CPU, each has a
thread, which reads sources, such as channels, whose last request was on its lane, and puts what it finds on
the lane where it belongs. Only that of the first lane, whose steps are the shortest, wakes up for them, and
reads those of the other while that one sleeps.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from expertd.service.engine.batching import Scheduler
from expertd.service.engine.errors import QueueFullError
from expertd.service.engine.jobs import JOB_SECONDS
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.steps import QueueState
from expertd.service.engine.queue_counts import Backlog
from expertd.service.engine.steps import DEFAULT_PRIORITY, Done, Pending, Runner
from expertd.service.engine.wakeup import Source
from expertd.service.moe.request import LayerRequest, StepResult
from expertd.service.settings.lanes import LANES, lanes_of
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import ChannelSettings

T = TypeVar("T")

# Microseconds before a worker sleeps. With a GPU, callers come back when they have computed what lies between
# two layers, and a thread that slept is up to 0.3 ms late; a CPU has other work for its cores.
_GPU_SPIN, _CPU_SPIN = 1000, 50


class Lanes:
    """Two lanes, with the methods of one `Scheduler`; a request is on the one that its tokens fit.

    decode_max_tokens  of a request on the first lane
    """

    switch_seconds = 0.2e-3  # the threads of both lanes wait for each other, too

    def __init__(self, decode: Scheduler, prefill: Scheduler, decode_max_tokens: int) -> None:
        self.lanes = (decode, prefill)
        self.decode_max_tokens = decode_max_tokens
        self._threads = [decode, prefill]  # lanes with a worker thread of their own
        decode.worker.leaves = lambda source: source.lane > 0 and not prefill.is_asleep
        prefill.worker.leaves = lambda source: source.lane == 0

    def start(self) -> None:
        """Start the worker threads."""
        for lane in self.lanes:
            lane.start()

    def set_device(self, spin_seconds: float, leaves_cpu: bool) -> None:
        """See `Scheduler.set_device`. Where steps leave the CPU alone, one thread begins those of both lanes.

        No request has been accepted.
        """
        decode, prefill = self.lanes
        decode.set_device(spin_seconds, leaves_cpu)
        if leaves_cpu and prefill in self._threads:
            self._threads.remove(prefill)
            decode.worker.leaves = lambda source: False
            decode.take(prefill)

    def runner(self, model: str) -> Runner:
        """The decode lane's runner of `model`; the prefill lane's validates requests in the same way."""
        return self.lanes[0].runner(model)

    async def between_steps(self, job: Callable[[], T], may_take: float = JOB_SECONDS) -> T:
        """Run `job` on the first worker thread while no step runs on any lane, and return its result.

        may_take  see `Scheduler.do_between_steps`; it waits for the other lane's steps, too
        """
        resume = threading.Event()
        parked = [_park(lane, resume) for lane in self._threads[1:]]

        def alone() -> T:
            for each in parked:
                each.result()
            return job()

        try:
            done = self.do_between_steps(alone, max(may_take, JOB_SECONDS))
        except BaseException:
            resume.set()
            raise
        done.add_done_callback(lambda _: resume.set())
        return await asyncio.wrap_future(done)

    def do_between_steps(self, job: Callable[[], T], may_take: float = JOB_SECONDS) -> "Future[T]":
        """Run `job` on the first worker thread while it runs no step; see `Scheduler.do_between_steps`."""

        def between() -> T:
            others = self.lanes[len(self._threads) :]  # on this thread, too
            for lane in others:
                lane.finish_all()
            for lane in (self.lanes[0], *others):
                lane.do_chores()
            return job()

        return self.lanes[0].do_between_steps(between, may_take)

    def tell_changes(self, on_change: Callable[[str, int, Backlog], None]) -> None:
        """See `Scheduler.tell_changes`."""
        for lane in self.lanes:
            lane.tell_changes(on_change)

    def check_capacity(self, model: str, num_tokens: int = 1, caller: int = 0) -> None:
        """Raise as `Scheduler.check_capacity` if every request of at least `num_tokens` would be refused."""
        decode, prefill = self.lanes
        if num_tokens <= self.decode_max_tokens:
            with suppress(QueueFullError):
                decode.check_capacity(model, num_tokens, caller)
                return
        prefill.check_capacity(model, num_tokens, caller)

    def submit(
        self,
        model: str,
        request: LayerRequest,
        done: Done,
        on_worker: bool = False,
        alone: bool = False,
        priority: int = DEFAULT_PRIORITY,
        caller: int = 0,
        timeout: float | None = None,
    ) -> Pending:
        """Put `request` in the model's queue on its lane; see `Scheduler.submit`.

        The event loop runs steps of the first lane only: the others' would delay its requests.
        """
        lane = self.lanes[request.num_tokens > self.decode_max_tokens]
        alone = alone and lane is self.lanes[0]
        return lane.submit(model, request, done, on_worker, alone, priority, caller, timeout)

    def cancel(self, pending: Pending, error: Exception) -> bool:
        """Answer a queued request with `error`; see `Scheduler.cancel`."""
        return self.lanes[pending.lane].cancel(pending, error)

    def add_source(self, source: Source) -> None:
        """Have the worker threads poll `source`, from now on."""
        for lane in self._threads:
            lane.add_source(source)

    def remove_source(self, source: Source) -> None:
        """Poll `source` no more, once a poll that has begun is over."""
        for lane in self._threads:
            lane.remove_source(source)

    def poll_sources(self) -> None:
        """Poll every source once, so that what has arrived is accepted, even during a step."""
        self.lanes[0].poll_sources()

    def do_later(self, chore: Callable[[], None]) -> None:
        """See `Scheduler.do_later`; for each worker thread."""
        next((lane for lane in self.lanes if lane.is_here), self.lanes[0]).do_later(chore)

    def report_later(self, report: Callable[[], None]) -> None:
        """See `Scheduler.report_later`; for each worker thread, which has its own reports called soon."""
        next((lane for lane in self.lanes if lane.is_here), self.lanes[0]).report_later(report)

    def waiting(self, model: str) -> tuple[int, int]:
        """The numbers of queued requests and tokens of `model`, on all lanes."""
        state = self.queue_state(model)
        return state.num_requests, state.num_tokens

    def queue_state(self, model: str) -> QueueState:
        """For metrics: the sums of all lanes."""
        return QueueState(*map(sum, zip(*(lane.queue_state(model) for lane in self.lanes), strict=True)))

    def queue_states(self, models: Iterable[str]) -> dict[str, dict[str, QueueState]]:
        """For metrics: those of each lane, by its name and by model."""
        names = zip(LANES, self.lanes, strict=True)
        return {name: {model: lane.queue_state(model) for model in models} for name, lane in names}

    def give_up(self, error: Exception) -> None:
        """Answer every request with `error`, also those of steps that never end; on the event loop."""
        for lane in self.lanes:
            lane.give_up(error)

    def failures(self, model: str) -> int:
        """The number of consecutive failed steps of `model` on the lane with most of them."""
        return max(lane.failures(model) for lane in self.lanes)

    def close(self) -> None:
        """Refuse new requests; accepted ones are still answered."""
        for lane in self.lanes:
            lane.close()

    def cancel_all(self) -> None:
        """Answer every queued request with SchedulerClosedError."""
        for lane in self.lanes:
            lane.cancel_all()

    @property
    def unanswered(self) -> int:
        """The number of accepted requests without an answer."""
        return sum(lane.unanswered for lane in self.lanes)

    async def drained(self) -> None:
        """Wait until every accepted request is answered."""
        for lane in self.lanes:
            await lane.drained()

    @property
    def running(self) -> bool:
        """Whether any worker thread is alive."""
        return any(lane.running for lane in self.lanes)

    def stop(self, timeout: float) -> bool:
        """Stop the worker threads after their current steps; True if they ended within `timeout` seconds."""
        end = time.monotonic() + timeout
        for lane in self.lanes:
            lane.end()
        ended = [lane.stop(max(0.0, end - time.monotonic())) for lane in self.lanes]
        return all(ended)


AnyScheduler = Scheduler | Lanes


def spin_seconds_of(channels: ChannelSettings, on_gpu: bool) -> float:
    """For which a server looks for requests of channels without sleeping."""
    given = channels.spin_microseconds
    return ((_GPU_SPIN if on_gpu else _CPU_SPIN) if given is None else given) / 1e6


def scheduler_of(settings: Settings, metrics: Metrics) -> AnyScheduler:
    """The scheduler of a server, with or without lanes, whose steps `metrics` counts."""
    spin_seconds = spin_seconds_of(settings.channels, on_gpu=False)  # until the layers are loaded
    lanes = lanes_of(settings)
    if len(lanes) == 1:
        return Scheduler(lanes[0].limits, metrics, spin_seconds)
    decode, prefill = (
        Scheduler(lane.limits, _LaneObserver(lane.name, metrics), spin_seconds, number)
        for number, lane in enumerate(lanes)
    )
    return Lanes(decode, prefill, settings.lanes.decode_max_tokens)


class _LaneObserver:
    """Reports the steps of one lane to `metrics`. Implements `StepObserver`."""

    def __init__(self, lane: str, metrics: Metrics) -> None:
        self._lane, self._metrics = lane, metrics

    def step_done(self, model: str, result: StepResult, queue_seconds: Sequence[float]) -> None:
        self._metrics.step_done(model, result, queue_seconds, self._lane)

    def step_failed(self, model: str, num_requests: int) -> None:
        self._metrics.step_failed(model, num_requests)


def _park(lane: Scheduler, resume: threading.Event) -> "Future[None]":
    """Have `lane` begin no step until `resume`; done once it waits, cancelled if it never will.

    Its time is not limited: the job that it waits for has a limit.
    """
    parked: Future[None] = Future()

    def wait() -> None:
        parked.set_result(None)
        resume.wait()

    # By its end at the latest: one that has waited has its result.
    lane.do_between_steps(wait, math.inf).add_done_callback(lambda _: parked.cancel())
    return parked
