"""The server's life cycle without HTTP: loading, ready, draining, stopped. Owns the executor."""

import asyncio
import logging
import math
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial

import numpy as np
from numpy.typing import NDArray
from prometheus_client.core import Metric

from expertd.service.engine.errors import (
    DeviceFailedError,
    DeviceLostError,
    ExecutorClosedError,
    ModelUnloadedError,
    NotReadyError,
    PartitionsRefusedError,
    PartitionsUnavailableError,
    PlacementUnavailableError,
    QueueFullError,
    RoutingUnavailableError,
)
from expertd.service.engine.executor import executor_of, spin_seconds_of
from expertd.service.engine.idle_memory import give_back_idle
from expertd.service.engine.lane import StepLane
from expertd.service.engine.layers import LoadCancelledError, weights_ids
from expertd.service.engine.loading import LoadedLayers, Loader, Partitions
from expertd.service.engine.metrics import Metrics
from expertd.service.engine.metrics.device import GpuSensors
from expertd.service.engine.metrics.steps import QueueState
from expertd.service.engine.placement import Placements
from expertd.service.engine.profiling import Profiling, Recording
from expertd.service.engine.queue_counts import Backlog, QueueCounts
from expertd.service.engine.repository import Repository
from expertd.service.engine.shared_memory import RegisteredRegions
from expertd.service.engine.spec import MODEL_VERSION, LayerSpec, served, specs_of
from expertd.service.engine.steps import Submission
from expertd.service.engine.watchdog import Watchdog
from expertd.service.memory import Arena, RegionUses
from expertd.service.moe.request import LayerRequest, zero_request
from expertd.service.settings.lanes import lanes_of
from expertd.service.settings.model import Settings
from expertd.service.util.sentences import all_of

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0
_LOOK_SECONDS = 0.01  # between looks at what waits in HTTP processes
# After this many consecutive failures, the device is the likely cause: the model becomes not ready.
_FAILING_STEPS = 5
_SENTENCES = (ValueError, OSError, MemoryError)  # of loading: their texts say what is wrong


class Phase(Enum):
    """A server's phase. Requests are accepted when READY, and in DRAINING until the executor closes."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Engine:
    """Loads the models of `settings` on the worker thread and runs requests on them."""

    def __init__(self, settings: Settings, metrics: Metrics, load: Loader) -> None:
        self.settings = settings
        self.instance = secrets.token_hex(8)  # tells this process from those before and after it
        self.phase = Phase.LOADING
        self.models = specs_of(settings)
        self.executor = executor_of(settings, metrics)
        self.submit, self.cancel = self.executor.submit, self.executor.cancel
        self.check_capacity = self.executor.check_capacity
        self.repository = Repository(settings, self.executor)
        self.loaded: LoadedLayers | None = None
        self.arena: Arena | None = None  # of large bodies and outputs, once loaded
        self.shared_memory = RegisteredRegions(settings.shared_memory)
        self.can_be_reached: Callable[[], bool] = lambda: True  # by all of the server's processes
        self._counts: QueueCounts | None = None
        self._metrics = metrics
        self._load = load
        self._loading: asyncio.Task[None] | None = None
        self._giving_back: asyncio.Task[None] | None = None
        self._retries: dict[str, asyncio.Task[None]] = {}
        self._watchdog: Watchdog | None = None
        self._failure: str | None = None  # of the device, for good
        about = self._num_steps, self._about, self._streams
        self._profiling = Profiling(
            self.executor, *about, lambda: self.loaded.recordings if self.loaded else None
        )
        shapes = {model.name: model.shape for model in settings.models}
        lanes = [lane.name for lane in lanes_of(settings) if lane.name]
        metrics.add_models(shapes, settings.metrics.max_expert_series, lanes)
        self._sensors = GpuSensors()
        self._routing = asyncio.Lock()

    def why_not_ready(self, *models: str) -> str | None:
        """Why `models` (none given: all) are not ready; None if they are ready.

        A model whose steps keep failing is not ready. It still accepts requests, and the first step that
        succeeds makes it ready again.
        """
        if self._failure is not None:
            return self._failure
        if self.phase is not Phase.READY:
            return f"the server is {self.phase.value}"
        if not self.can_be_reached():
            return "the server is starting its HTTP processes"
        if self.loaded is not None and (lost := self.loaded.why_not()) is not None:
            return lost
        if missing := [model for model in models if not self.repository.serves(model)]:
            return f"model {missing[0]}: {self.repository.describe(missing[0])}"
        if failing := self._failing(models):
            return f"model {', '.join(failing)}: at least the last {_FAILING_STEPS} steps failed"
        return None

    def check_ready(self, *models: str) -> None:
        """Raise NotReadyError unless ready; also runs one token on each failing model, to detect recovery.

        Whoever asks needs no key, so the error names no model but `models`.
        """
        reason = self.why_not_ready(*models)
        if reason is None:
            return
        if self.phase is Phase.READY and self.loaded is not None and self.loaded.why_not() is None:
            failing = self._failing(models)
            for model in failing:
                if model not in self._retries:
                    self._retries[model] = asyncio.get_running_loop().create_task(self._retry(model))
            if failing and not models and self._failure is None:
                count = f"{len(failing)} of {len(self.models)} models"
                reason = f"{count}: at least the last {_FAILING_STEPS} steps failed"
        raise NotReadyError(reason)

    @property
    def device_failed(self) -> bool:
        """Whether the device hangs or has failed: then nothing of it can be freed."""
        return self._failure is not None

    @property
    def draining(self) -> bool:
        return self.phase is Phase.DRAINING

    def model(self, name: str, version: str = MODEL_VERSION) -> LayerSpec:
        """The configured model `name`, loaded or not. Raises UnknownModelError if there is none."""
        return served(self.models, name, version)

    def model_without_key(self, name: str, version: str = MODEL_VERSION) -> LayerSpec:
        """As `model`, for calls that need no key, whose errors name no other model."""
        return served(self.models, name, version, names_all=False)

    def served(self, name: str, version: str = MODEL_VERSION) -> LayerSpec:
        """The same, unless it is not loaded at present. Raises UnknownModelError, NotReadyError."""
        spec = self.model(name, version)
        self.repository.check(name)
        return spec

    def check_loaded(self, model: str) -> None:
        """Raise NotReadyError while it is loading, ModelUnloadedError, DeviceLostError if no step can run."""
        if self.loaded is None:
            raise NotReadyError(f"model {model} is not ready: the server is {self.phase.value}")
        if (lost := self.loaded.why_not()) is not None:
            raise DeviceLostError(f"model {model} is not ready: {lost}")
        self.repository.check(model)

    def validate(self, model: str, request: LayerRequest) -> None:
        """Raise ValueError for invalid routing, and as `check_loaded` if the model was unloaded meanwhile."""
        self.executor.runner(model).validate(request)

    def region_uses(self) -> RegionUses | None:
        """The regions of a new request; see `RegisteredRegions.uses`."""
        return self.shared_memory.uses()

    def start(self) -> None:
        """Start the worker thread, which then loads the models; returns at once."""
        sys.setswitchinterval(self.executor.switch_seconds)
        self.executor.start()
        self.executor.watch_workers(self._give_up)
        if self.settings.num_ranks == 1:  # else their group notices
            self._watchdog = Watchdog(self.executor.lanes, self.settings.step_timeout_seconds, self._give_up)
        self._loading = asyncio.get_running_loop().create_task(self._finish_loading())

    def share_counts(self, counts: QueueCounts) -> None:
        """Tell the server's HTTP processes what waits, and count what waits there."""
        self._counts = counts
        numbers = {model: number for number, model in enumerate(self.models)}
        self.executor.tell_changes(lambda model, lane, backlog: counts.set(numbers[model], lane, backlog))

    async def wait_loaded(self) -> None:
        """Wait until loading has succeeded or failed."""
        if self._loading is not None:
            await asyncio.wait({self._loading})

    def begin_drain(self) -> None:
        """Become not ready; safe in a signal handler."""
        if self.phase is not Phase.FAILED:
            self.phase = Phase.DRAINING

    async def drain(self) -> bool:
        """Refuse new requests after the configured delay; True if all accepted requests are answered."""
        self.begin_drain()
        await asyncio.sleep(self.settings.shutdown_delay_seconds)
        self.repository.close()
        until = time.monotonic() + self.settings.drain_timeout_seconds
        while any(elsewhere.num_requests for elsewhere in self._elsewhere()) and time.monotonic() < until:
            await asyncio.sleep(_LOOK_SECONDS)
        self.executor.poll_sources()
        self.executor.close()
        try:
            await asyncio.wait_for(self.executor.drained(), max(0.0, until - time.monotonic()))
        except TimeoutError:
            text = "requests still unanswered after drain_timeout_seconds: %d, and no longer waited for"
            logger.error(text, self.executor.unanswered)
            self.executor.cancel_all()
            return False
        return True

    async def stop(self) -> None:
        """Stop the worker thread, waiting a few seconds at most for a step or compilation in progress."""
        self.begin_drain()
        self.repository.close()
        stopped = await asyncio.to_thread(self.executor.stop, _STOP_SECONDS)
        if self._watchdog is not None:
            self._watchdog.stop()
        if stopped and not self.device_failed:
            await self.shared_memory.stop()
            if self.arena is not None:
                self.arena.close()
            if self.loaded is not None:
                await asyncio.to_thread(self.loaded.close)
        elif not stopped:
            logger.warning("the worker thread is still busy: exiting without waiting for it")
        others = (self._loading, self._giving_back)
        for task in (tasks := [*self._retries.values(), *(task for task in others if task is not None)]):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def set_partitions(self, sizes: Mapping[str, int]) -> None:
        """Replace all SM partitions between two steps, or change nothing.

        Raises PartitionsUnavailableError if the device cannot be partitioned, PartitionsRefusedError if the
        sizes do not fit it, and NotReadyError during loading.
        """
        partitions = self.partitions()
        users = [(model.partition, f"model {model.name} runs") for model in self.settings.models]
        users += [(name, "a lane runs") for name in self.settings.lanes.partitions.values()]
        for name, who in users:
            if name is not None and name not in sizes:
                got = all_of(sizes) or "none"
                expected = f"{name!r}, in which {who}, among them"
                raise PartitionsRefusedError(f"partitions: expected {expected}, got {got}")
        await self.executor.between_steps(partial(self._replace, partitions, sizes))

    async def profile(
        self, steps: int, seconds: float, run: Callable[[], Awaitable[None]] | None = None
    ) -> Recording:
        """A Chrome trace of the next steps; see `Profiling.record`. Raises NotReadyError, too."""
        if self.loaded is None:
            raise NotReadyError(f"the server is {self.phase.value}")
        return await self._profiling.record(steps, seconds, run)

    async def route(self, model: str, request: LayerRequest) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(topk_ids [T, top_k], topk_weights [T, top_k]) that the model's router chooses, between two steps.

        Raises RoutingUnavailableError with several ranks, and as `check_loaded` does.
        """
        self.check_loaded(model)
        assert self.loaded is not None
        if self.loaded.route is None:
            ranks = self.settings.num_ranks
            raise RoutingUnavailableError(f"routing: expected one rank, got {ranks}")
        async with self._routing:  # one between two steps: many callers must not keep steps waiting
            return await self.executor.between_steps(partial(self.loaded.route, model, request), 0.0)

    def gpu_metrics(self) -> Iterator[Metric]:
        """Power, clocks and more of the GPUs; not on the event loop, because drivers take time."""
        return self._sensors.metrics(self.loaded.gpus() if self.loaded else ())

    def placements(self) -> Placements:
        """The placements of all layers. Raises PlacementUnavailableError if they never change."""
        if self.loaded is None:
            raise NotReadyError(f"the server is {self.phase.value}")
        if self.loaded.placements is None:
            ranks = self.settings.num_ranks
            got = "one rank" if ranks == 1 else f"{ranks} ranks and null"
            expected = "several ranks, and the setting placement.policy"
            raise PlacementUnavailableError(f"placement: expected {expected}, got {got}")
        return self.loaded.placements

    def partitions(self) -> Partitions:
        """The device's partitions. Raises PartitionsUnavailableError if it cannot be partitioned."""
        if self.loaded is None:
            raise NotReadyError(f"the server is {self.phase.value}")
        if self.loaded.partitions is None:
            expected = "a backend whose device has SMs to partition"
            raise PartitionsUnavailableError(f"partitions: expected {expected}, got {self.loaded.backend!r}")
        return self.loaded.partitions

    def partition_sizes(self) -> tuple[int, dict[str, int]] | None:
        """(SMs of the device, partition -> granted SMs); None if there are none, or none yet."""
        partitions = self.loaded.partitions if self.loaded else None
        if partitions is None:
            return None
        return partitions.total_sms, {p.name: p.num_sms for p in partitions.partitions}

    def _replace(self, partitions: Partitions, sizes: Mapping[str, int]) -> None:
        try:
            partitions.apply(sizes)
        except ValueError as error:
            raise PartitionsRefusedError(str(error)) from error
        assert self.loaded is not None

        def cancelled() -> bool:
            self.executor.lanes[0].jobs.goes_on()  # asked before each layer's graphs are captured
            return self.phase is not Phase.READY

        try:
            self.loaded.prepare_steps(cancelled)
        except LoadCancelledError:
            return
        except Exception:  # the new partitions are in place, and steps still run
            logger.exception("partitions were replaced, but capturing CUDA graphs failed: steps run eagerly")

    async def _finish_loading(self) -> None:
        try:
            loaded, arena, ids = await self.executor.between_steps(self._load_all, math.inf)
            try:
                await self._begin_serving(loaded, arena, ids)
            except BaseException:
                self.loaded = self.arena = None
                arena.close()
                await asyncio.to_thread(loaded.close)
                raise
        except (LoadCancelledError, ExecutorClosedError):  # by the end of the server
            return
        except Exception as error:
            if self.phase is Phase.LOADING:
                self.phase = Phase.FAILED
            logger.error("loading failed: %s", error, exc_info=not isinstance(error, _SENTENCES))

    async def _begin_serving(self, loaded: LoadedLayers, arena: Arena, ids: dict[str, str]) -> None:
        weights = {model.name: model.weight for model in self.settings.models}
        self.executor.set_runners(*loaded.runners_of_lanes, weights=weights)
        self.executor.set_max_running(loaded.max_running)
        self.executor.watch_device(loaded.failure, self._give_up)
        for lane in self.executor.lanes:
            await asyncio.wrap_future(lane.do_between_steps(loaded.prepare_thread))
        loaded.prepare_thread()  # the event loop begins short steps, too
        on_gpu = loaded.register_files is not None or self.settings.devices is not None
        self.executor.set_device(spin_seconds_of(self.settings.channels, on_gpu), on_gpu)
        if loaded.calls is not None:
            self.executor.answer_calls(loaded.calls)
        self.loaded, self.arena = loaded, arena
        self._giving_back = asyncio.get_running_loop().create_task(give_back_idle(arena))
        self.repository.start(loaded, ids)
        self.shared_memory.start(loaded, arena)
        self._metrics.set_backend(loaded.backend, loaded.device)
        if self.phase is Phase.LOADING:
            self.phase = Phase.READY
            logger.info(
                "ready: %s on %s, %s", ", ".join(loaded.runners) or "no model", loaded.device, loaded.backend
            )

    def _load_all(self) -> tuple[LoadedLayers, Arena, dict[str, str]]:
        loaded = self._load(self.settings, lambda: self.phase is not Phase.LOADING)
        try:
            ids = weights_ids(model for model in self.settings.models if model.load)
            return loaded, Arena(self.settings.buffered_bytes, loaded.register), ids
        except BaseException:
            loaded.close()
            raise

    def _give_up(self, why: str) -> None:
        """The device hangs, and the worker thread with it, or has failed: the server ends."""
        if self._failure is not None:
            return
        logger.critical("%s: this process ends, and has to be started again", why)
        self._failure, self.phase = why, Phase.FAILED
        self.executor.give_up(DeviceFailedError(why))

    def _failing(self, models: tuple[str, ...]) -> list[str]:
        names = [model for model in models or self.models if self.repository.serves(model)]
        return [model for model in names if self.executor.failures(model) >= _FAILING_STEPS]

    async def _retry(self, model: str) -> None:
        try:
            for lane in self.executor.lanes:
                if self.repository.serves(model) and lane.failures(model):
                    await self._try(lane, model)
        finally:
            del self._retries[model]

    async def _try(self, lane: StepLane, model: str) -> None:
        tried = asyncio.Event()
        request = zero_request(1, self.models[model].hidden_size)
        with suppress(QueueFullError, ExecutorClosedError, ModelUnloadedError, NotReadyError):
            lane.submit(Submission(model, request, lambda _: tried.set()))
            await tried.wait()

    def queue_states(self) -> dict[str, QueueState]:
        """What waits for each model; on any thread."""
        states = {}
        for name, elsewhere in zip(self.models, self._elsewhere(), strict=True):
            state = self.executor.queue_state(name)
            states[name] = state._replace(
                num_requests=state.num_requests + elsewhere.num_requests,
                num_tokens=state.num_tokens + elsewhere.num_tokens,
            )
        return states

    def _elsewhere(self) -> list[Backlog]:
        """What waits for each model in HTTP processes."""
        if self._counts is None:
            return [Backlog(0, 0)] * len(self.models)
        return [self._counts.elsewhere(number) for number in range(len(self.models))]

    def _num_steps(self) -> int:
        return sum(statistics.steps.steps for statistics in self._metrics.statistics().values())

    def _about(self) -> dict[str, object]:
        """What a trace says of the server."""
        assert self.loaded is not None
        sms = self.partition_sizes()
        partitions = None if sms is None else {"device": sms[0], **sms[1]}
        return {"backend": self.loaded.backend, "device": self.loaded.device, "sms": partitions}

    def _streams(self) -> Sequence[tuple[str, object]]:
        return self.loaded.streams() if self.loaded else ()
