"""The layers of this process: made ready for steps, with graphs on a GPU, and freed again."""

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from expertd.kernels import Backend
from expertd.service.device import Device, GraphPool, Stream, device_of
from expertd.service.engine.device_calls import DeviceCalls
from expertd.service.engine.errors import ModelUnloadedError
from expertd.service.engine.layers import Cancelled, MakeLayer, stop_if
from expertd.service.engine.memory_needs import needs_of_model, needs_of_models, staging_of_model
from expertd.service.engine.runner_sets import LaneRunners
from expertd.service.moe.base import Layer
from expertd.service.moe.expert_store import StoreMemory
from expertd.service.moe.needs import Needs
from expertd.service.moe.out_of_memory import does_not_fit, in_one_sentence
from expertd.service.moe.request import LayerRequest, zero_request
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.step.stages import StageTimer
from expertd.service.moe.step.staging import Staging
from expertd.service.moe.step.step_counts import HostCopies, Launches, StepUse
from expertd.service.settings.lanes import lanes_of
from expertd.service.settings.model import Settings
from expertd.service.settings.served import ModelSettings
from expertd.service.util.heap import give_back_freed
from expertd.service.util.logs import progress_bar, shows_bars

if TYPE_CHECKING:
    from expertd.kernels.partitions import SMPartitions

logger = logging.getLogger(__name__)

Held = Callable[[ModelSettings], Sequence[int]]


class LocalModels:
    """Runs on the worker thread between steps, but for `read`.

    make_layer  makes each model's layer
    barrier     waits for those who run a layer's steps together with this process, before they begin
    held        the experts of each model that this process holds; None: all of the model's
    store       what stores of experts share, and count; None: there are none
    sets        the runners of the loaded models, for each lane
    calls       to the layers, by GPUs of callers; None: the backend answers none
    """

    def __init__(
        self,
        settings: Settings,
        backend: Backend,
        partitions: "SMPartitions | None",
        make_layer: MakeLayer,
        barrier: Callable[[], None],
        held: Held | None = None,
        store: StoreMemory | None = None,
    ) -> None:
        # The front end of several ranks hands them no traces.
        traced = settings.tracing.endpoint is not None and settings.num_ranks == 1
        self._device = device_of(backend.device)
        timer = StageTimer(self._device) if traced else None
        self.sets = [LaneRunners(lane, self._device, partitions, timer) for lane in lanes_of(settings)]
        self._settings, self._limits = settings, settings.limits
        self._backend = backend
        self._make_layer, self._barrier, self._held, self._store = make_layer, barrier, held, store
        self._staged_bytes = 0
        self._pools: dict[Staging, GraphPool] = {}
        self.calls: DeviceCalls | None = None
        if backend.capabilities.device_calls:
            self.calls = DeviceCalls(self._device, self.sets[0].runners)

    def load_all(self, models: Sequence[ModelSettings], cancelled: Cancelled) -> None:
        """Load `models` at start-up. Raises as `expertd.service.engine.loading.load` does."""
        self._check_memory_of(models)
        with progress_bar("layers", len(models), "layer") as advance:
            for model in models:
                stop_if(cancelled)
                if not shows_bars():
                    logger.info("loading model %s", model.name)
                advance(0, model.name)
                with in_one_sentence(model.name, self._needs(model), self._device):
                    layer = self._make_layer(model, self._backend, self._device.tensors, cancelled)
                    self._add(model, layer)
                advance(1, model.name)
        give_back_freed()  # by reading and packing weights, and by compiling kernels
        self.capture(cancelled)

    def check_memory(self, model: ModelSettings) -> None:
        """Raise MemoryError, with the numbers, unless `model` fits beside what is loaded."""
        self._device.free_unused()  # what torch keeps for later steps is free
        needs, free = self._needs(model), self._device.free_bytes()
        if needs.total > free:
            raise does_not_fit(f"model {model.name}", needs, free)

    def _check_memory_of(self, models: Sequence[ModelSettings]) -> None:
        """Raise MemoryError, with the numbers, unless all `models` fit, before anything is read."""
        held = [(model, self._num_held(model)) for model in models]
        needs = needs_of_models(self._settings, held, self._backend.capabilities)
        free = self._device.free_bytes()
        if needs.total > free:
            names = f"model {models[0].name}" if len(models) == 1 else f"{len(models)} models"
            raise does_not_fit(names, needs, free)

    def _num_held(self, model: ModelSettings) -> int:
        return len(model.shape.held_experts if self._held is None else self._held(model))

    def read(self, model: ModelSettings, cancelled: Cancelled) -> Layer:
        """The layer of `model`, with its weights on the device; on any thread, while steps run."""
        stream = self._device.new_stream()  # of its own: steps wait for work on the default one
        with in_one_sentence(model.name, self._needs(model), self._device), self._device.on(stream):
            layer = self._make_layer(model, self._backend, self._device.tensors, cancelled)
            stream.synchronize()
            if self._device.is_host:  # so that the first step on the worker thread has its matrices
                _first_steps(LayerRunner(layer, self._device), model, self._limits.max_request_tokens)
            give_back_freed()
            return layer

    def add(self, model: ModelSettings, layer: Layer) -> LayerRunner:
        """The runner of a layer that was read: it has run its first steps, and has its graphs."""
        try:
            with in_one_sentence(model.name, self._needs(model), self._device):
                self._add(model, layer)
                for runner in [each.runners[model.name] for each in self.sets]:
                    if runner.can_capture:
                        _capture(runner, self._pools, self._device)
        except BaseException:
            self.remove(model.name)
            raise
        return self.sets[0].runners[model.name]

    def remove(self, name: str) -> None:
        """Forget a model; `collect` then frees its memory."""
        for each in self.sets:
            runner = each.runners.pop(name, None)
            if runner is not None:
                runner.release_graphs()
                del runner
            if each.staging in self._pools:
                each.staging.allow_graphs()  # of the others' steps that recur
                shapes = [other.layer.shape for other in each.runners.values()]
                each.staging.forget_shared([(shape.hidden_size, shape.top_k) for shape in shapes])

    def collect(self) -> None:
        """Free memory that nothing refers to any more."""
        gc.collect()
        self._device.free_unused()

    def capture(self, cancelled: Cancelled) -> None:
        """Capture the CUDA graphs of all models, again after partitions were replaced."""
        runners = [runner for each in self.sets for runner in each.runners.values()]
        captured = [runner for runner in runners if runner.can_capture]
        self._pools = {}
        self._pools = capture_graphs(captured, self._device, cancelled, self._barrier)

    def route(self, name: str, request: LayerRequest) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """What the router of a model chooses; see `LayerRunner.route`. Raises ModelUnloadedError."""
        runner = self.sets[0].runners.get(name)
        if runner is None:
            raise ModelUnloadedError(f"model {name}: expected a loaded one, got it unloaded")
        return runner.route(request)

    def use(self) -> StepUse:
        """What all steps have used up to now; on any thread."""
        launches: dict[str, Launches] = {}
        weights: dict[str, int] = {}
        for each in self.sets:
            for name, counted in list(each.launches.items()):
                of = launches.setdefault(name, Launches())
                for field in fields(of):
                    setattr(of, field.name, getattr(of, field.name) + getattr(counted, field.name))
            for name, runner in list(each.runners.items()):
                weights[name] = runner.layer.weights.num_bytes
        copies = [each.host_copies for each in self.sets]
        total = HostCopies(sum(each.num_bytes for each in copies), sum(each.seconds for each in copies))
        stores = {} if self._store is None else dict(self._store.counts)
        return StepUse(launches, weights, total, self._memory(sum(weights.values())), stores)

    def streams(self) -> list[tuple[str, Stream]]:
        """The streams of all steps, each with a name; none on a CPU. One may have several names."""
        return [stream for each in self.sets for stream in each.streams()]

    def _memory(self, weights: int) -> dict[str, int] | None:
        in_all = self._device.memory()
        if in_all is None:
            return None
        staging = sum(each.staging.device_bytes for each in self.sets if each.staging is not None)
        torchs = self._device.reserved_bytes()
        workspace = max(0, torchs - weights - staging)
        outside = max(0, in_all[0] - torchs)
        return {"weights": weights, "staging": staging, "workspace": workspace, "outside": outside}

    def _add(self, model: ModelSettings, layer: Layer) -> None:
        if not self._device.is_host:
            self._staged_bytes = max(self._staged_bytes, staging_of_model(self._limits, model))
        for each in self.sets:
            runner = each.add(model, layer)
            self._barrier()
            _first_steps(runner, model, self._limits.max_request_tokens)

    def _needs(self, model: ModelSettings) -> Needs:
        capabilities, grown = self._backend.capabilities, 0
        if not self._device.is_host:
            grown = max(0, staging_of_model(self._limits, model) - self._staged_bytes)
        return needs_of_model(self._settings, model, capabilities, self._num_held(model), staging=grown)


def capture_graphs(
    runners: Sequence[LayerRunner],
    device: Device,
    cancelled: Cancelled,
    barrier: Callable[[], None] = lambda: None,
) -> dict[Staging, GraphPool]:
    """Capture CUDA graphs in new pools: the old ones' memory belongs to streams that may no longer exist.

    Returns the pools.
    """
    pools: dict[Staging, GraphPool] = {}
    if not runners:
        return pools
    for runner in runners:
        runner.release_graphs()
    gc.collect()  # graphs and streams that are unreachable
    device.free_unused(workspaces=True)
    with progress_bar("graphs", len(runners), "layer") as advance:
        for runner in runners:
            stop_if(cancelled)
            barrier()
            _capture(runner, pools, device)
            advance(1, "")
    return pools


def _capture(runner: LayerRunner, pools: dict[Staging, GraphPool], device: Device) -> None:
    """Steps that use the same memory take turns, and so do their graphs, which share a pool."""
    if runner.staging not in pools:
        pools[runner.staging] = device.new_graph_pool()
    runner.capture(pools[runner.staging])


def _first_steps(runner: LayerRunner, model: ModelSettings, max_request_tokens: int) -> None:
    """Run one step in each layout the settings allow, so that a layer that fails never becomes ready."""
    for num_tokens in sorted({1, min(model.masked_max_tokens + 1, max_request_tokens)}):
        runner.run([zero_request(num_tokens, model.hidden_size)])
