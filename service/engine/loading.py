"""Start-up: backend, SM partitions, weights, and a test step of every model before requests are accepted."""

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from expertd.activation import COMMON, ExpertRule
from expertd.backends import BACKENDS
from expertd.kernels import Backend, resolve_backend
from expertd.kernels.backends import why_not
from expertd.service.checkpoints import CheckpointModelSettings, LayerSource
from expertd.service.checkpoints.weights import read_layer
from expertd.service.engine.placement import Placements
from expertd.service.engine.rank_metrics import RankState
from expertd.service.engine.runner_sets import RunnerSet, set_split
from expertd.service.engine.steps import Runner
from expertd.service.memory import OpenCuda, Register, nothing_to_register
from expertd.service.moe.base import Layer
from expertd.service.moe.capture import GraphPool
from expertd.service.moe.device import device_memory, device_name, prepare_thread, register_for
from expertd.service.moe.ipc import opener_for
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.out_of_memory import in_one_sentence
from expertd.service.moe.request import zero_request
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.staging import Staging
from expertd.service.moe.weights import ExpertWeights, check_weights, load_weights, random_weights
from expertd.service.settings.lanes import lanes_of
from expertd.service.settings.model import Settings
from expertd.service.settings.served import ModelSettings
from expertd.service.terminal import progress_bar, shows_bars

if TYPE_CHECKING:
    from expertd.kernels.partitions import SMPartitions

logger = logging.getLogger(__name__)

Cancelled = Callable[[], bool]


class LoadCancelledError(Exception):
    """The server was stopped during loading."""


class Partition(Protocol):
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
    def partitions(self) -> Sequence[Partition]: ...

    def apply(self, sizes: Mapping[str, int]) -> Sequence[Partition]: ...


@dataclass(frozen=True)
class Loaded:
    """The result of loading.

    memory returns (used, total) bytes of the device, None without a GPU. Call prepare_steps on the worker
    thread after partitions are replaced: it captures CUDA graphs again. It may raise LoadCancelledError or
    fail; steps run in either case. register makes host memory accessible to the device. register_files does
    so for files of callers, who may shrink them; None: the CPU copies. open_cuda opens GPU memory of other
    processes; None without a GPU. why_not says why no step can run at present, and they raise
    DeviceLostError. ranks are those that share the layers. placements say which rank holds which experts;
    None: that never changes. close ends what loading has started, after all steps. prefill_runners are those
    of the prefill lane; None: both lanes have the same. Call prepare_thread on every thread that begins
    steps. set_split gives the decode lane so many SMs and the prefill lane the others, or with 0 all of them;
    call it as `Partitions.apply`. None: no such lanes.
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
    ranks: Callable[[], Sequence[RankState]] = tuple
    placements: Placements | None = None
    close: Callable[[], None] = lambda: None
    prefill_runners: Mapping[str, Runner] | None = None
    prepare_thread: Callable[[], None] = lambda: None
    set_split: Callable[[int], None] | None = None

    @property
    def runners_of_lanes(self) -> tuple[Mapping[str, Runner], Mapping[str, Runner]]:
        """Those of the first lane, which may be the only one, and those of the prefill lane."""
        return self.runners, self.runners if self.prefill_runners is None else self.prefill_runners


Loader = Callable[[Settings, Cancelled], Loaded]


class MakeLayer(Protocol):
    """Makes the layer that a model describes; `layer_of` is one."""

    def __call__(
        self, model: ModelSettings, backend: Backend, device: torch.device, cancelled: Cancelled, /
    ) -> Layer: ...


def load(
    settings: Settings,
    cancelled: Cancelled,
    make_layer: MakeLayer | None = None,
    meet: Callable[[], None] = lambda: None,
) -> Loaded:
    """Load everything in `settings`, on the worker thread, which will also run the steps.

    make_layer  makes each model's layer; None: `layer_of`
    meet        waits for those who run a layer's steps together with this process, before they begin

    Raises ValueError if the device or a weights file does not fit the settings, MemoryError if a model does
    not fit in the device's memory, and LoadCancelledError once `cancelled` returns True.
    """
    try:
        backend = resolve_backend(settings.backend)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    device = backend.device
    if settings.backend == "auto" and device.type == "cpu":
        _warn_of_cpu(backend)
    _warm_up(backend, cancelled)
    partitions = backend.partitions()
    if partitions is not None:
        partitions.apply(settings.partitions)
    elif settings.partitions:
        raise ValueError(
            f"partitions: expected a backend whose device has SMs to partition, got {backend.name!r}"
        )

    sets = _load_models(settings, backend, partitions, cancelled, make_layer or layer_of, meet)
    every = [runner for each in sets for runner in each.runners.values()]
    on_gpu = [runner for runner in every if runner.layer.is_capturable] if device.type == "cuda" else []
    capture_graphs(on_gpu, device, cancelled, meet)
    split = None
    if partitions is not None and settings.lanes.decode_p99_ms is not None:
        split = partial(set_split, settings.lanes, sets[-1], partitions)
    return Loaded(
        backend.name,
        device_name(device),
        sets[0].runners,
        partitions,
        lambda: device_memory(device),
        partial(capture_graphs, on_gpu, device, meet=meet),
        register_for(device),
        register_for(device) if device.type == "cuda" else None,
        opener_for(device),
        prefill_runners=sets[-1].runners,
        prepare_thread=partial(prepare_thread, device),
        set_split=split,
    )


def _load_models(
    settings: Settings,
    backend: Backend,
    partitions: "SMPartitions | None",
    cancelled: Cancelled,
    make_layer: MakeLayer,
    meet: Callable[[], None],
) -> list[RunnerSet]:
    """The runners of each lane, on the same layers."""
    lanes = lanes_of(settings)
    sets = [RunnerSet(lane, backend.device, partitions) for lane in lanes]
    with progress_bar("layers", len(settings.models), "layer") as advance:
        for model in settings.models:
            _stop_if(cancelled)
            if not shows_bars():
                logger.info("loading model %s", model.name)
            advance(0, model.name)
            with in_one_sentence(model.name, model.shape, backend.device):
                layer = make_layer(model, backend, backend.device, cancelled)
                for each in sets:
                    runner = each.add(model, layer)
                    meet()
                    _first_steps(runner, model, settings.limits.max_request_tokens)
            advance(1, model.name)
    return sets


def layer_of(model: ModelSettings, backend: Backend, device: torch.device, cancelled: Cancelled) -> MoELayer:
    """The layer that `model` describes, with its weights on `device`. Raises as `load` does."""
    return MoELayer(
        model.shape,
        weights_of(model, device, cancelled),
        backend,
        routing=model.routing.rule,
        rule=rule_of(model),
        masked_max_tokens=model.masked_max_tokens,
    )


def rule_of(model: ModelSettings) -> ExpertRule:
    """What the experts of `model` compute."""
    return model.rule if isinstance(model, CheckpointModelSettings) else COMMON


def weights_of(
    model: ModelSettings, device: torch.device, cancelled: Cancelled, held: Sequence[int] | None = None
) -> ExpertWeights:
    """The weights of `model` on `device`. Raises as `load` does.

    held  these of the model's routed experts in this order, also several times, then all shared ones; None:
          the model's
    """
    every = model.shape.held_experts
    part = None if held is None else [expert - every.start for expert in held]
    if isinstance(model, CheckpointModelSettings):
        shape, source = model.shape, model.source
        if part is not None:
            shape = replace(shape, local_experts=range(len(part)))
            source = source.part(part, len(every))
        return _from_checkpoint(model.name, source, shape, device, cancelled)
    if model.weights.path is not None:
        return load_weights(model.weights.path, model.shape, device, part)
    return random_weights(model.shape, model.weights.seed or 0, device, part)


def _from_checkpoint(
    name: str, source: LayerSource, shape: LayerShape, device: torch.device, cancelled: Cancelled
) -> ExpertWeights:
    start = time.perf_counter()
    with progress_bar(name, source.num_bytes, "B") as advance:

        def progress(num_bytes: int) -> None:
            _stop_if(cancelled)
            advance(num_bytes, "")

        weights = read_layer(source, device, progress)
    check_weights(shape, weights)
    if not shows_bars():
        seconds, megabytes = time.perf_counter() - start, source.num_bytes / 1e6
        logger.info("read %.1f MB of %s, %.0f MB/s", megabytes, name, megabytes / seconds)
    return weights


def _warn_of_cpu(backend: Backend) -> None:
    """Warn if a PyTorch built for CUDA runs on a CPU: a GPU was probably intended."""
    if torch.version.cuda is None:
        return
    reasons = [f"{name}: {reason}" for name in BACKENDS if (reason := why_not(name)) is not None]
    logger.warning(
        "backend auto: expected a GPU, because PyTorch is built for CUDA %s, got a CPU and backend %r (%s)",
        torch.version.cuda,
        backend.name,
        "; ".join(reasons),
    )


def _warm_up(backend: Backend, cancelled: Cancelled) -> None:
    with ExitStack() as stack:
        advance: Callable[[int, str], None] | None = None

        def progress(done: int, total: int, what: str) -> None:
            nonlocal advance
            _stop_if(cancelled)
            if advance is None:  # only now: there may be nothing to compile
                advance = stack.enter_context(progress_bar("kernels", total, "kernel"))
            advance(1, what)
            if not shows_bars():
                logger.info("kernel %d of %d is ready: %s", done, total, what)

        backend.warm_up(progress)


def _first_steps(runner: LayerRunner, model: ModelSettings, max_request_tokens: int) -> None:
    """Run one step in each layout the settings allow, so that a layer that fails never becomes ready."""
    for num_tokens in sorted({1, min(model.masked_max_tokens + 1, max_request_tokens)}):
        runner.run([zero_request(num_tokens, model.hidden_size)])


def capture_graphs(
    runners: Sequence[LayerRunner],
    device: torch.device,
    cancelled: Cancelled,
    meet: Callable[[], None] = lambda: None,
) -> None:
    """Capture CUDA graphs in new pools: the old ones' memory belongs to streams that may no longer exist."""
    if not runners:
        return
    for runner in runners:
        runner.release_graphs()
    gc.collect()  # graphs and streams that are unreachable
    torch._C._cuda_clearCublasWorkspaces()  # torch keeps 32 MiB for every stream that cuBLAS ran on
    torch.cuda.empty_cache()
    pools: dict[Staging, GraphPool] = {}  # steps that use the same memory take turns, and so do their graphs
    with progress_bar("graphs", len(runners), "layer") as advance:
        for runner in runners:
            _stop_if(cancelled)
            meet()
            if runner.staging not in pools:
                pools[runner.staging] = GraphPool(device)
            runner.capture(pools[runner.staging])
            advance(1, "")


def _stop_if(cancelled: Cancelled) -> None:
    if cancelled():
        raise LoadCancelledError
