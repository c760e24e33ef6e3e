"""A rank's part of every model, and its part of every step."""

import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from expertd.kernels import Backend, Overlap, RankMemory, overlaps
from expertd.service.device import Device, device_of
from expertd.service.device.cuda import use_gpu
from expertd.service.engine.layers import (
    Cancelled,
    MakeLayer,
    packing,
    rule_of,
    weights_for_store,
    weights_of,
)
from expertd.service.engine.loading import LoadedLayers, load
from expertd.service.engine.memory_needs import expert_slots
from expertd.service.engine.steps import Runner, Step
from expertd.service.moe.base import Layer
from expertd.service.moe.expert_store import ExpertStore, StoreMemory
from expertd.service.moe.parallel import (
    ExchangeError,
    JointExchange,
    MakeStore,
    ParallelLayer,
    PlacedExperts,
    TorchExchange,
    join_group,
)
from expertd.service.moe.runner import LayerRunner
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.step.step_counts import StoreCounts
from expertd.service.moe.weights import MATRICES, ExpertWeights
from expertd.service.ranks.messages import MOVED, NO_STEP, MoveCommand, StepEnd, number_and_body
from expertd.service.ranks.regions import MappedRegions
from expertd.service.ranks.setup import MAX_RUNNING, SPIN_SECONDS, RankSetup, Rings, Role
from expertd.service.ranks.shares import ExchangeSizes, max_rank_tokens
from expertd.service.ranks.worker.mover import RankPlacements, check_moves
from expertd.service.ranks.worker.own_steps import OwnStep, OwnSteps
from expertd.service.settings.served import ModelSettings
from expertd.service.settings.spans import numbers
from expertd.service.util.files import temporary_directory

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 3600.0  # for ranks that load more slowly; the front end ends those whose peers are gone
_DEVICE_SECONDS = 5.0  # a launch waits so long for another rank: they begin a step within milliseconds
_POLL_SECONDS = 50e-6
# A rank on a GPU sleeps later: its host has cores to spare, and being woken takes as long as a small step.
_GPU_SPIN_SECONDS = 500e-6


@dataclass(slots=True)
class _Running:
    number: int
    step: Step
    model: str
    partition: str | None  # None: the whole device


def share_sms(partition: str | None, other: str | None) -> bool:
    """Whether steps in these partitions (None: the whole device) may be on the same SMs at the same time."""
    return partition != other and None in (partition, other)


class RankWorker:
    """Loads the part of every model. Raises as `load` does, and ExchangeError if the ranks do not meet."""

    def __init__(self, setup: RankSetup, regions: MappedRegions) -> None:
        self._setup, self._regions = setup, regions
        devices = setup.settings.devices
        if devices is None:  # the ranks share the CPU's cores
            torch.set_num_threads(max(1, torch.get_num_threads() // setup.settings.ranks_per_node))
        else:
            use_gpu(numbers(devices), setup.local_rank)
            # Where torch makes a socket for memory that ranks share: it tries no other folder.
            os.putenv("TMPDIR", str(temporary_directory("devices")))
        os.putenv("GLOO_SOCKET_IFNAME", setup.rendezvous.interface)
        store = setup.rendezvous.store(str(setup.generation))
        # GPUs of one node exchange no tensors by it.
        transport = "gloo" if devices is None or setup.settings.nnodes == 1 else "nccl"
        join_group(store, setup.rank, setup.num_ranks, timeout_seconds=_JOIN_SECONDS, backend=transport)
        self._memories: dict[object, RankMemory] = {}
        self._device: Device  # of all layers
        self._joint: dict[str, ParallelLayer] = {}  # whose ranks launch together
        self._overlap: Overlap | None = None  # one for all layers: their steps run one after another
        self._counted: dict[str, StoreCounts] = {}  # of stores, by model, at the last step's end
        self._placements = RankPlacements(setup, store, regions)
        self._placed: list[PlacedExperts] = []  # of the models, in their order
        self.loaded: LoadedLayers = load(
            setup.settings, lambda: False, self._layers, self._barrier, self._placements.held
        )
        self._placements.set_layers(self._placed)
        self._barrier()
        self._check_ranks()
        self._models: list[tuple[ModelSettings, Runner]] = [
            (model, self.loaded.runners[model.name]) for model in setup.settings.models
        ]
        # A proxy sends a rank's own rows only.
        share = (0, 1) if setup.role is Role.REMOTE else (setup.rank, setup.num_ranks)
        self._own_steps = OwnSteps(setup.settings.models, setup.num_ranks, share, regions)
        self._running: deque[_Running] = deque()
        self.jobs: deque[Callable[[], None]] = deque()  # to do while no step runs, after the bell of commands
        self._replays = False  # the last step replays a graph

    def serve(self, rings: Rings, stopped: Callable[[], bool], say: Callable[..., None]) -> None:
        """Run steps in the order of their commands, until `stopped` and its bell say so.

        say  tells the front end what has come of commands that are no steps
        """
        commands, bell = rings.commands, rings.command_bell
        here = self._setup.role is Role.HERE  # else commands come through other threads of this process
        spin = _GPU_SPIN_SECONDS if here and self._setup.settings.devices is not None else SPIN_SECONDS

        most = min(MAX_RUNNING, self.loaded.max_running)

        def may_begin() -> bool:
            return len(self._running) < most

        def called() -> bool:
            return stopped() or bool(self.jobs) or (may_begin() and not commands.is_empty())

        while not stopped():
            if self._running:
                bell.wait(lambda: called() or self._running[0].step.is_done(), spin, _POLL_SECONDS)
            else:
                bell.wait(called, spin)
            if self.jobs and not self._running:
                self._own_steps.forget()  # the job may free the graphs of their plans
                self.jobs.popleft()()
            if may_begin() and (data := commands.take()) is not None:
                if data.startswith(NO_STEP):
                    while self._running:
                        self._finish(rings)
                    say(MOVED, *self._placements.move(MoveCommand.unpacked(data)))
                else:
                    self._begin(*number_and_body(data), rings)
            elif self._running and self._running[0].step.is_done():
                self._finish(rings)

    def _layers(self, memory: StoreMemory | None) -> MakeLayer:
        self._stores = memory
        return self._layer

    def _store(self, model: ModelSettings, backend: Backend) -> MakeStore | None:
        """What makes the store of a layer's experts here; None: it has none."""
        of_all = expert_slots(self._setup.settings, backend.capabilities)
        if (memory := self._stores) is None or (slots := of_all.get(model.name)) is None:
            return None

        def make(shape: LayerShape, weights: ExpertWeights) -> ExpertStore:
            with packing(model):
                return ExpertStore(memory, model.name, shape, weights, slots, backend)

        return make

    def _layer(
        self, model: ModelSettings, backend: Backend, device: torch.device, cancelled: Cancelled
    ) -> Layer:
        self._device, store = device_of(device), self._store(model, backend)
        read = weights_of if store is None else weights_for_store
        weights = read(model, device, cancelled, self._placements.held(model))
        moves = self._setup.settings.placement.policy is not None
        check_moves(model, weights, moves)
        settings = self._setup.settings
        exchange: TorchExchange | JointExchange
        if settings.nnodes == 1 and backend.capabilities.joint_exchange:
            lanes = self._lanes(model, device) if store is None else None
            exchange = JointExchange(self._memory(model, device), lanes, settings.overlap.mode)
        else:
            exchange = TorchExchange()
        layer = ParallelLayer(
            model.shape, weights, backend, exchange, routing=model.routing.rule, rule=rule_of(model),
            exact=settings.combines_exactly, physical=self._placements.physical(model), store=store,
        )  # fmt: skip
        self._placed.append(layer.placed)
        if isinstance(exchange, JointExchange):
            self._joint[model.name] = layer
        packs = any(each.format in backend.capabilities.packs for each in model.shape.weight_layouts)
        if packs and not moves:
            del weights  # so that each matrix is freed when it is packed
            with packing(model):
                for name in MATRICES:
                    layer.pack(name)
        return layer

    def _barrier(self) -> None:
        """Wait for all ranks if launches do: not for one that is still loading."""
        if self._memories:
            self._device.synchronize()
            dist.barrier()

    def _lanes(self, model: ModelSettings, device: torch.device) -> Overlap | None:
        """The lanes of a layer some of whose steps overlap; else None."""
        settings, num_ranks = self._setup.settings.overlap, self._setup.num_ranks
        max_tokens = [max_rank_tokens(self._setup.settings)] * num_ranks
        if model.partition is not None or not overlaps(settings.mode, max_tokens, model.hidden_size):
            return None
        if self._overlap is None:
            try:
                self._overlap = Overlap.of(device.index, settings.communication_sms)
            except ValueError as error:
                raise ValueError(f"overlap.{error}") from error
        return self._overlap

    def _memory(self, model: ModelSettings, device: torch.device) -> RankMemory:
        """What the layers of one stream share, which run one after another."""
        assert dist.group.WORLD is not None
        settings = self._setup.settings
        sizes = ExchangeSizes.of(settings, model)
        key = model.partition, sizes
        if key not in self._memories:
            exact = settings.combines_exactly
            self._memories[key] = RankMemory(dist.group.WORLD, device, *sizes, _DEVICE_SECONDS, exact)
        return self._memories[key]

    def _begin(self, number: int, body: bytes, rings: Rings) -> None:
        try:
            own = self._own_steps.of(body)
            step = self._step(number, own, rings)
        except Exception as error:
            while self._running:  # ends are in the order of the steps
                self._finish(rings)
            self._fail(rings, number, error)
            return
        model = self._models[own.model][0]
        self._running.append(_Running(number, step, model.name, model.partition))
        if step.is_done():
            self._finish(rings)

    def _step(self, number: int, own: OwnStep, rings: Rings) -> Step:
        """Begin a step. On GPUs the ranks must make the same launches, so the whole step decides how."""
        model, runner = self._models[own.model]
        layer = self._joint.get(model.name)
        if layer is None:
            self._begin_placed(number, own)
            return runner.begin(own.requests)
        assert isinstance(runner, LayerRunner)
        # All graphs use the same memory; and two steps that share SMs could wait for each other, if one has
        # these SMs on one rank, and the other one on another.
        shares = any(share_sms(model.partition, each.partition) for each in self._running)
        if own.graph is not None or self._replays or shares:
            while self._running:
                self._finish(rings)
        with runner.on_stream():
            self._begin_placed(number, own)
        if own.graph is not None:
            step = runner.replay([r for r in own.requests if r.num_tokens], *own.graph)
            if step is not None:
                self._replays = True
                return step
        self._replays = False
        with runner.on_stream():
            layer.set_token_counts(own.counts)
        return runner.launch(own.requests)

    def _begin_placed(self, number: int, own: OwnStep) -> None:
        self._placements.begin_step(
            number, own.model, sum(own.counts), self._setup.rank, self._setup.num_ranks
        )

    def _finish(self, rings: Rings) -> None:
        running = self._running.popleft()
        try:
            result = running.step.finish()
            self._check_ranks()
            tokens = result.tokens_per_expert.astype(np.int64)
            of_step = result.compute_seconds, result.layout, tokens, result.empty_slots
            end = StepEnd(running.number, "", *of_step, self._since_last_end(running.model))
        except Exception as error:
            self._fail(rings, running.number, error)
            return
        self._end(rings, end)

    def _since_last_end(self, model: str) -> StoreCounts:
        """What a layer's store has done since the last step of it that has ended."""
        now = StoreCounts() if self._stores is None else self._stores.counts.get(model, StoreCounts())
        before, self._counted[model] = self._counted.get(model, StoreCounts()), replace(now)
        return now.less(before)

    def _fail(self, rings: Rings, number: int, error: Exception) -> None:
        """A step has failed; the process ends if its device has, and all ranks start again."""
        if (why := self.loaded.failure()) is not None:
            logger.critical("the device has failed: %s: this process ends", why)
            os._exit(1)  # nothing of the device can be freed
        logger.debug("step %d failed", number, exc_info=error)
        self._end(rings, StepEnd.failed(number, f"{type(error).__name__}: {error}"))

    def _check_ranks(self) -> None:
        for memory in self._memories.values():
            if memory.late_rank is not None:
                expected = f"expected rank {memory.late_rank} to take part within {_DEVICE_SECONDS:g} s"
                raise ExchangeError(f"step: {expected}, got nothing")

    @staticmethod
    def _end(rings: Rings, end: StepEnd) -> None:
        rings.ends.put(end.packed())
        rings.end_bell.ring()
