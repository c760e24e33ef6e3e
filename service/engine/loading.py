"""Start-up: backend, SM partitions, weights, and a test step of every model before requests are accepted."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from expertd.kernels import Backend, resolve_backend
from expertd.kernels.backends import why_on_cpu
from expertd.service.device import Stream, device_of
from expertd.service.engine.calls import CallServer
from expertd.service.engine.layers import Cancelled, MakeLayer, packed_layer_of, stop_if, stored_layers
from expertd.service.engine.local_models import Held, LocalModels
from expertd.service.engine.memory_needs import expert_slots
from expertd.service.engine.metrics.ranks import RankState
from expertd.service.engine.placement import Placements
from expertd.service.engine.profiling import Recordings
from expertd.service.engine.steps import Runner
from expertd.service.memory import OpenCuda, Register, nothing_to_register
from expertd.service.moe.expert_store import StoreMemory
from expertd.service.moe.request import LayerRequest
from expertd.service.moe.step.step_counts import NOTHING, StepUse
from expertd.service.settings.model import Settings
from expertd.service.settings.served import ModelSettings
from expertd.service.util.logs import progress_bar, shows_bars

logger = logging.getLogger(__name__)


class GrantedPartition(Protocol):
    """A named share of the device's SMs: the number requested and the number granted."""

    @property
    def name(self) -> str: ...
    @property
    def requested_sms(self) -> int: ...
    @property
    def num_sms(self) -> int: ...


class Partitions(Protocol):
    """The part of `expertd.kernels.partitions.SMPartitions` that the service uses."""

    @property
    def device_name(self) -> str: ...
    @property
    def total_sms(self) -> int: ...
    @property
    def granularity(self) -> int: ...
    @property
    def partitions(self) -> Sequence[GrantedPartition]: ...

    def apply(self, sizes: Mapping[str, int]) -> Sequence[GrantedPartition]: ...


class Models(Protocol):
    """Implemented by `expertd.service.engine.local_models.LocalModels`; its methods say more."""

    def check_memory(self, model: ModelSettings) -> None: ...
    def read(self, model: ModelSettings, cancelled: Cancelled) -> Any: ...
    def add(self, model: ModelSettings, layer: Any) -> Runner: ...
    def remove(self, name: str) -> None: ...
    def collect(self) -> None: ...


Route = Callable[[str, LayerRequest], tuple[NDArray[np.int32], NDArray[np.float32]]]
"""The topk_ids [T, top_k] and topk_weights [T, top_k] of a model for a request."""


@dataclass(frozen=True)
class LoadedLayers:
    """The result of loading.

    memory returns (used, total) bytes of the device, None without a GPU. Call prepare_steps on the worker
    thread after partitions are replaced: it captures CUDA graphs again. It may raise LoadCancelledError or
    fail; steps run in either case. register makes host memory accessible to the device. register_files does
    so for files of callers, who may shrink them; None: the CPU copies. open_cuda opens GPU memory of other
    processes; None without a GPU. why_not says why no step can run at present, and they raise
    DeviceLostError. failure says after a step that failed why the device computes nothing any more: then the
    process has to end. ranks are those that share the layers. placements say which rank holds which experts;
    None: that never changes. models loads further ones, and unloads those; None: it is not supported. close
    ends what loading has started, after all steps. prefill_runners are those of the prefill lane; None: both
    lanes have the same. Call prepare_thread on every thread that begins steps. use returns what steps have
    used, on any thread; gpus the UUIDs of the GPUs. route says what a model's router chooses for a request,
    on the worker thread; None: the routers are elsewhere. streams, on the worker thread, are those of steps
    and their copies, with names. recordings are of the ranks, if steps run there. max_running steps may have
    begun at a time. calls are those that GPUs of callers make by themselves; None: they cannot.
    """

    backend: str
    device: str
    runners: Mapping[str, Runner]
    partitions: Partitions | None
    memory: Callable[[], tuple[int, int] | None]
    prepare_steps: Callable[[Cancelled], None]
    register: Register = nothing_to_register
    register_files: Register | None = None
    open_cuda: OpenCuda | None = None
    why_not: Callable[[], str | None] = lambda: None
    failure: Callable[[], str | None] = lambda: None
    ranks: Callable[[], Sequence[RankState]] = tuple
    placements: Placements | None = None
    models: Models | None = None
    close: Callable[[], None] = lambda: None
    prefill_runners: Mapping[str, Runner] | None = None
    prepare_thread: Callable[[], None] = lambda: None
    use: Callable[[], StepUse] = lambda: NOTHING
    gpus: Callable[[], Sequence[str]] = tuple
    route: Route | None = None
    streams: Callable[[], Sequence[tuple[str, Stream]]] = tuple
    recordings: Recordings | None = None
    max_running: int = 2
    calls: CallServer | None = None

    @property
    def runners_of_lanes(self) -> tuple[Mapping[str, Runner], Mapping[str, Runner]]:
        """Those of the first lane, which may be the only one, and those of the prefill lane."""
        return self.runners, self.runners if self.prefill_runners is None else self.prefill_runners


Loader = Callable[[Settings, Cancelled], LoadedLayers]


def load(
    settings: Settings,
    cancelled: Cancelled,
    make_layers: Callable[[StoreMemory | None], MakeLayer] | None = None,
    barrier: Callable[[], None] = lambda: None,
    held: Held | None = None,
) -> LoadedLayers:
    """Load everything in `settings`, on the worker thread, which will also run the steps.

    make_layers  what makes each model's layer, with what stores share, if there are some; None:
                 `packed_layer_of`
    barrier      waits for those who run a layer's steps together with this process, before they begin
    held         the experts of each model that this process holds; None: all of the model's

    Raises ValueError if the device or a weights file does not fit the settings, MemoryError if models do
    not fit in the device's memory, and LoadCancelledError once `cancelled` returns True.
    """
    try:
        backend = resolve_backend(settings.backend, weight_formats=settings.weight_formats)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    device = device_of(backend.device)
    if settings.backend == "auto" and device.is_host:
        _warn_of_cpu(backend)
    _warm_up(backend, cancelled)
    partitions = backend.partitions()
    if partitions is not None:
        partitions.apply(settings.partitions)
    elif settings.partitions:
        raise ValueError(
            f"partitions: expected a backend whose device has SMs to partition, got {backend.name!r}"
        )

    store = StoreMemory(device) if (slots := expert_slots(settings, backend.capabilities)) else None
    if make_layers is not None:
        make_layer = make_layers(store)
    else:
        make_layer = packed_layer_of if store is None else stored_layers(store, slots)
    models = LocalModels(settings, backend, partitions, make_layer, barrier, held, store)
    models.load_all([model for model in settings.models if model.load], cancelled)
    decode, prefill = models.sets[0], models.sets[-1]
    return LoadedLayers(
        backend.name,
        device.name,
        decode.runners,
        partitions,
        device.memory,
        models.capture,
        device.register,
        device.register_files,
        device.open_cuda,
        failure=device.failure,
        models=models if decode is prefill and store is None else None,
        prefill_runners=prefill.runners,
        prepare_thread=device.prepare_thread,
        use=models.use,
        gpus=device.uuids,
        route=models.route,
        streams=models.streams,
        max_running=2 if store is None else 1,
        calls=models.calls if decode is prefill and settings.num_ranks == 1 else None,
    )


def _warn_of_cpu(backend: Backend) -> None:
    """Warn if a PyTorch built for CUDA runs on a CPU: a GPU was probably intended."""
    if torch.version.cuda is not None and (reasons := why_on_cpu()) is not None:
        logger.warning(
            "backend auto: expected a GPU, because PyTorch is built for CUDA %s, got a CPU and backend "
            "%r (%s)",
            torch.version.cuda,
            backend.name,
            reasons,
        )


def _warm_up(backend: Backend, cancelled: Cancelled) -> None:
    with ExitStack() as stack:
        advance: Callable[[int, str], None] | None = None

        def progress(done: int, total: int, what: str) -> None:
            nonlocal advance
            stop_if(cancelled)
            if advance is None:  # only now: there may be nothing to compile
                advance = stack.enter_context(progress_bar("kernels", total, "kernel"))
            advance(1, what)
            if not shows_bars():
                logger.info("kernel %d of %d is ready: %s", done, total, what)

        backend.warm_up(progress)
