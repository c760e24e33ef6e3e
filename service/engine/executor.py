"""Runs queued requests on the device in steps, on one lane or two.

With two lanes, short and long requests have queues of their own, whose steps run at the same time. On a GPU,
one thread runs the steps of both (see `worker`). On a CPU, each has a thread, which reads sources, such as
channels, whose last request was on its lane, and puts what it finds on the lane where it belongs. Only that
of the first lane, whose steps are the shortest, wakes up for them, and reads those of the other while that
one sleeps.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TypeVar

from expertd.service.engine.calls import Calls
from expertd.service.engine.errors import EngineError, ExecutorClosedError, QueueFullError
from expertd.service.engine.jobs import JOB_SECONDS
from expertd.service.engine.lane import StepLane
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.steps import QueueState
from expertd.service.engine.queue_counts import Backlog
from expertd.service.engine.steps import Runner, Submission
from expertd.service.engine.wakeup import RequestSource
from expertd.service.moe.request import StepResult
from expertd.service.settings.lanes import LANES, lanes_of
from expertd.service.settings.model import Settings
from expertd.service.settings.parts import ChannelSettings

T = TypeVar("T")

# Microseconds before a worker sleeps. With a GPU, callers come back when they have computed what lies between
# two layers, and a thread that slept is up to 0.3 ms late; a CPU has other work for its cores.
_GPU_SPIN, _CPU_SPIN = 1000, 50
# How long a thread waits before it asks another one for Python's lock; by default 5 ms, which would make
# timeouts late. The threads of two lanes wait for each other, too.
_SWITCH_SECONDS, _LANES_SWITCH_SECONDS = 1e-3, 0.2e-3


class Executor:
    """Owns the lanes. `submit` and `cancel` are safe from any thread.

    lanes              one, or that of short requests and that of the others
    decode_max_tokens  of a request on the first of two
    """

    def __init__(self, *lanes: StepLane, decode_max_tokens: float = math.inf) -> None:
        self.lanes = lanes
        self._first = lanes[0]
        self._max_tokens = decode_max_tokens
        self._threads = list(lanes)  # lanes with a worker thread of their own
        self.switch_seconds = _SWITCH_SECONDS if len(lanes) == 1 else _LANES_SWITCH_SECONDS
        if len(lanes) > 1:
            decode, prefill = lanes
            decode.worker.leaves = lambda source: source.lane > 0 and not prefill.is_asleep
            prefill.worker.leaves = lambda source: source.lane == 0

    # Its beginning and end.

    def start(self) -> None:
        """Start the worker threads; answers are delivered to the running event loop."""
        for lane in self.lanes:
            lane.completions.start()
            lane.worker.thread.start()

    def set_runners(self, *runners: Mapping[str, Runner], weights: Mapping[str, float] | None = None) -> None:
        """Set each lane's runners of models, and the models' shares of the device, by default 1."""
        for lane, of_lane in zip(self.lanes, runners, strict=False):
            lane.queues.set_runners(of_lane, weights or {})

    def set_max_running(self, count: int) -> None:
        """Set how many steps the runners of a lane take at a time, at least 2; before the first request."""
        for lane in self.lanes:
            lane.early.max_running = count

    def watch_device(self, failure: Callable[[], str | None], on_failure: Callable[[str], None]) -> None:
        """After a failed step, ask `failure`; if it says why the device has failed, tell `on_failure`.

        That is called on the event loop, at least once. Requests get DeviceFailedError.
        """
        for lane in self.lanes:
            lane.stepping.failure, lane.stepping.on_failure = failure, on_failure

    def watch_workers(self, on_failure: Callable[[str], None]) -> None:
        """If a worker thread ends by an error, tell `on_failure`, on the event loop, why."""
        loop = self._first.completions.loop
        for lane in self.lanes:
            lane.worker.on_failure = lambda why: loop.call_soon_threadsafe(on_failure, why)

    def set_device(self, spin_seconds: float, leaves_cpu: bool) -> None:
        """Tell of the device, before the first request.

        spin_seconds  for which the first thread looks for requests of sources before it sleeps
        leaves_cpu    steps leave the CPU alone, so one thread begins those of all lanes, and calls reports
                      while one runs: the event loop, with the interpreter's lock, would be in its way when it
                      begins the next one
        """
        first = self._first
        first.worker.spin_seconds = spin_seconds
        for lane in self.lanes:
            lane.completions.leaves_reports = leaves_cpu
        if leaves_cpu:
            first.worker.leaves = lambda source: False
            for lane in self._threads[1:]:
                lane.worker.retire()
                lane.worker = first.worker
                first.worker.take(lane)
            self._threads = [first]

    def answer_calls(self, calls: Calls) -> None:
        """Have the first thread answer `calls` while it has nothing else to do; before the first request."""
        self._first.calls = calls

    @contextmanager
    def pausing_calls(self) -> Iterator[None]:
        """Have calls answered in turns only, for what waits until the device has nothing to do.

        Not on a worker thread, nor on the event loop.
        """
        calls = self._first.calls
        calls.hold()
        try:
            if calls.are_made:
                self.do_between_steps(calls.stop).result()
            yield
        finally:
            calls.let_go()

    def close(self) -> None:
        """Refuse new requests; accepted ones are still answered, and counted in `unanswered` from now on."""
        for lane in self.lanes:
            lane.close()

    def cancel_all(self, model: str | None = None) -> None:
        """Answer every queued request, or those to a model, with ExecutorClosedError."""
        what = "the server is shutting down" if model is None else f"model {model} is being unloaded"
        for lane in self.lanes:
            lane.cancel_all(ExecutorClosedError(what), model)

    def give_up(self, error: Exception) -> None:
        """Answer every request and job with `error`, also those that never end; on the event loop."""
        for lane in self.lanes:
            lane.give_up(error)

    @property
    def unanswered(self) -> int:
        """The number of accepted requests without an answer."""
        return sum(lane.completions.unanswered for lane in self.lanes)

    async def drained(self) -> None:
        """Wait until every accepted request is answered."""
        for lane in self.lanes:
            await lane.completions.drained()

    def stop(self, timeout: float) -> bool:
        """Stop the worker threads after their current steps; True if they ended within `timeout` seconds."""
        end = time.monotonic() + timeout
        for lane in self.lanes:
            lane.end()
        for lane in self._threads:
            lane.worker.thread.join(max(0.0, end - time.monotonic()))
        return not self.running

    @property
    def running(self) -> bool:
        """Whether a worker thread is alive; it may be in a step that outlasted `stop`."""
        return any(lane.worker.thread.is_alive() for lane in self._threads)

    # Models, where there is one lane; see `Repository`.

    def add_runner(self, model: str, runner: Runner, weight: float = 1.0) -> None:
        """Serve one more model."""
        with self._first.queues.lock:
            self._first.queues.add_runner(model, runner, weight)

    def explain_missing(self, why: Callable[[str], EngineError]) -> None:
        """Refuse requests to a model without a runner with the error that `why` says."""
        for lane in self.lanes:
            lane.queues.why_missing = why

    def refuse_new(self, model: str) -> None:
        """Refuse new requests to `model` with ModelUnloadedError; accepted ones are still answered."""
        with self._first.queues.lock:
            self._first.queues[model].is_closed = True

    def remove_runner(self, model: str) -> bool:
        """Forget the runner of `model`, between steps; False if requests wait for it."""
        self._first.do_deferred()  # of its last step; what is reported of steps refers to their layer
        with self._first.queues.lock:
            return self._first.queues.remove_runner(model)

    def runner(self, model: str) -> Runner:
        """The first lane's runner of `model`; the other's validates requests in the same way.

        Raises ModelUnloadedError, or NotReadyError while it is loading.
        """
        return self._first.queues[model].runner

    # Jobs and requests.

    async def between_steps(self, job: Callable[[], T], may_take: float = JOB_SECONDS) -> T:
        """Run `job` on the first worker thread while no step runs on any lane, and return its result.

        may_take  see `StepLane.do_between_steps`; it waits for the other lane's steps, too
        """
        if len(self.lanes) == 1:
            return await asyncio.wrap_future(self.do_between_steps(job, may_take))
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
        """Run `job` on the first worker thread while it runs no step; see `StepLane.do_between_steps`."""
        if len(self.lanes) == 1:
            return self._first.do_between_steps(job, may_take)

        def between() -> T:
            others = self.lanes[len(self._threads) :]  # on this thread, too
            for lane in others:
                lane.finish_all()
            for lane in (self._first, *others):
                lane.do_deferred()
            return job()

        return self._first.do_between_steps(between, may_take)

    def check_capacity(self, model: str, num_tokens: int = 1, caller: int = 0) -> None:
        """Raise QueueFullError or ExecutorClosedError if requests of `num_tokens` or more were refused."""
        if num_tokens <= self._max_tokens and len(self.lanes) > 1:
            with suppress(QueueFullError):
                self._first.check_capacity(model, num_tokens, caller)
                return
        self.lanes[-1].check_capacity(model, num_tokens, caller)

    def submit(self, submission: Submission) -> Submission:
        """Put a request in the model's queue on its lane. Raises as `check_capacity` does.

        The event loop runs steps of the first lane only: the others' would delay its requests.
        """
        lane = self._first
        if submission.request.num_tokens > self._max_tokens:
            lane, submission.alone = self.lanes[1], False
        lane.submit(submission)
        return submission

    def cancel(self, submission: Submission, error: Exception) -> bool:
        """Answer a queued request with `error`; see `StepLane.cancel`."""
        return self.lanes[submission.lane].cancel(submission, error)

    # Sources, and what waits.

    def add_source(self, source: RequestSource) -> None:
        """Have the worker threads poll `source`, from now on."""
        for lane in self._threads:
            lane.worker.wakeup.add(source)

    def remove_source(self, source: RequestSource) -> None:
        """Poll `source` no more, once a poll that has begun is over."""
        for lane in self._threads:
            lane.worker.wakeup.remove(source)

    def poll_sources(self) -> None:
        """Poll every source once, so that what has arrived is accepted, even during a step."""
        self._first.poll_sources()

    def defer(self, call: Callable[[], None]) -> None:
        """Do `call` on the worker thread, once the next step runs or if there is none; for that thread."""
        self._here.stepping.deferred.append(call)

    def report_later(self, report: Callable[[], None]) -> None:
        """Call `report` soon, where it delays no step; for a worker thread."""
        self._here.completions.report_later(report)

    @property
    def _here(self) -> StepLane:
        """The lane of the worker thread that asks."""
        if len(self._threads) == 1:  # as most often, when every microsecond counts
            return self._first
        return next((lane for lane in self._threads if lane.is_here), self._first)

    # What it has to do.

    def tell_changes(self, on_change: Callable[[str, int, Backlog], None]) -> None:
        """Call `on_change`, on any thread, with a model, the lane, and what waits, whenever that changes."""
        for lane in self.lanes:
            with lane.queues.lock:
                lane.queues.on_change = _with_lane(on_change, lane.number)

    def waiting(self, model: str) -> tuple[int, int]:
        """The numbers of queued requests and tokens of `model`."""
        state = self.queue_state(model)
        return state.num_requests, state.num_tokens

    def queue_state(self, model: str) -> QueueState:
        """For metrics: the sums of all lanes; of a model that is not loaded, too."""
        return QueueState(*map(sum, zip(*(lane.queue_state(model) for lane in self.lanes), strict=True)))

    def queue_states(self, models: Iterable[str]) -> dict[str, dict[str, QueueState]]:
        """For metrics: those of each lane of two, by its name and by model."""
        names = zip(LANES, self.lanes, strict=True)
        return {name: {model: lane.queue_state(model) for model in models} for name, lane in names}

    def failures(self, model: str) -> int:
        """The number of consecutive failed steps of `model` on the lane with most of them."""
        return max(lane.failures(model) for lane in self.lanes)


def spin_seconds_of(channels: ChannelSettings, on_gpu: bool) -> float:
    """For which a server looks for requests of channels without sleeping."""
    given = channels.spin_microseconds
    return ((_GPU_SPIN if on_gpu else _CPU_SPIN) if given is None else given) / 1e6


def executor_of(settings: Settings, metrics: Metrics) -> Executor:
    """The executor of a server, with or without lanes, whose steps `metrics` counts."""
    spin_seconds = spin_seconds_of(settings.channels, on_gpu=False)  # until the layers are loaded
    lanes = lanes_of(settings)
    if len(lanes) == 1:
        return Executor(StepLane(lanes[0].limits, metrics, spin_seconds))
    return Executor(
        *(
            StepLane(lane.limits, _LaneObserver(lane.name, metrics), spin_seconds, number)
            for number, lane in enumerate(lanes)
        ),
        decode_max_tokens=settings.lanes.decode_max_tokens,
    )


class _LaneObserver:
    """Reports the steps of one lane to `metrics`. Implements `StepObserver`."""

    def __init__(self, lane: str, metrics: Metrics) -> None:
        self._lane, self._metrics = lane, metrics

    def step_done(self, model: str, result: StepResult, queue_seconds: Sequence[float]) -> None:
        self._metrics.step_done(model, result, queue_seconds, self._lane)

    def step_failed(self, model: str, num_requests: int) -> None:
        self._metrics.step_failed(model, num_requests)


def _with_lane(on_change: Callable[[str, int, Backlog], None], lane: int) -> Callable[[str, Backlog], None]:
    return lambda model, backlog: on_change(model, lane, backlog)


def _park(lane: StepLane, resume: threading.Event) -> "Future[None]":
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
