"""A rank's side of placements: which experts it loads, where tokens are, and the moves of experts."""

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from expertd.service.device import device_of
from expertd.service.moe.parallel import PlacedExperts
from expertd.service.moe.split import experts_of_rank, part_of
from expertd.service.moe.weights import ExpertWeights
from expertd.service.ranks.messages import ERROR_BYTES, MoveCommand, MoveKind
from expertd.service.ranks.placement import read_placements
from expertd.service.ranks.regions import MappedRegions
from expertd.service.ranks.setup import RankSetup, largest_expert
from expertd.service.ranks.worker.transport import (
    PeerTransport,
    RankTransport,
    Receive,
    Send,
    SharedTransport,
    TorchTransport,
)
from expertd.service.settings.served import ModelSettings

logger = logging.getLogger(__name__)


class RankPlacements:
    """For one rank. Without `placement.policy` it holds contiguous parts, for good. Raises RuntimeError."""

    def __init__(self, setup: RankSetup, store: Store, regions: MappedRegions) -> None:
        self._setup, self._regions = setup, regions
        self._models = list(setup.settings.models)
        self._placements: list[list[int]] | None = None
        if setup.settings.placement.policy is not None:
            self._placements = read_placements(store)
        self._layers: list[PlacedExperts] = []
        self._mover: Mover | None = None

    def physical(self, model: ModelSettings) -> Sequence[int] | None:
        """The expert of each of the model's physical experts; None: contiguous parts."""
        return None if self._placements is None else self._placements[self._models.index(model)]

    def held(self, model: ModelSettings) -> Sequence[int]:
        """The experts that this rank loads."""
        physical = self.physical(model) or model.shape.held_experts
        return experts_of_rank(physical, self._setup.rank, self._setup.num_ranks)

    def set_layers(self, layers: Sequence[PlacedExperts]) -> None:
        """Say what moves change, once all layers are loaded, in the order of the models. Collective."""
        if self._placements is None:
            return
        self._layers = list(layers)
        transport = self._transport(layers[0].tables.places.device)
        transport.connect()
        self._mover = Mover(self._setup.rank, self._layers, transport)

    def _transport(self, device: torch.device) -> RankTransport:
        num_bytes = largest_expert(self._setup.settings)
        if self._setup.settings.nnodes > 1:
            return TorchTransport(num_bytes, device)
        if device_of(device).is_host:
            return SharedTransport(self._setup.rank, num_bytes, self._regions.span)
        return PeerTransport(num_bytes, device)

    def begin_step(self, number: int, model: int, num_tokens: int, place: int, count: int) -> None:
        """Say where this rank's tokens are: by rows of the whole step, or by the step's number.

        place, count  the rank computes the part number `place` of `count`
        """
        if not self._layers:
            return
        layer = self._layers[model]
        if self._setup.settings.placement.objective == "activated":
            layer.begin_step(number, by_row=False)
        else:
            layer.begin_step(part_of(num_tokens, place, count).start)

    def move(self, command: MoveCommand) -> tuple[int, float, str]:
        """Carry out a command, after the steps before it: its number, its seconds, and an error or ""."""
        assert self._mover is not None
        try:
            with torch.inference_mode():
                return command.number, self._mover.run(command), ""
        except Exception as error:
            logger.debug("move %d failed", command.number, exc_info=error)
            return command.number, 0.0, f"{type(error).__name__}: {error}"[:ERROR_BYTES]


class Mover:
    """Carries out commands for the layers of `rank`.

    The expert that is fetched lies in the transport's memory until its round ends.
    """

    def __init__(self, rank: int, layers: Sequence[PlacedExperts], transport: RankTransport) -> None:
        self._rank, self._layers, self._transport = rank, layers, transport
        self._sizes = [[part.numel() for part in layer.expert_bytes(layer.slots.start)] for layer in layers]

    def run(self, command: MoveCommand) -> float:
        """Carry out a command; its seconds. Raises RuntimeError if a rank is gone."""
        began = time.perf_counter()
        layer = self._layers[command.model]
        match command.kind:
            case MoveKind.FETCH:
                self._exchange(layer, command)
            case MoveKind.PREPARE:
                self._prepare(layer, command)
            case MoveKind.SWITCH:
                self._switch(layer, command)
        # Other ranks go on, and so do this one's steps, on whichever stream.
        device_of(layer.tables.places.device).synchronize()
        return time.perf_counter() - began

    def _exchange(self, layer: PlacedExperts, command: MoveCommand) -> None:
        sends: list[Send] = []
        receives: list[Receive] = []
        fetched = self._transport.fetched(command.region)
        for fetch in command.fetches:
            to, source = (self._rank_of(layer, slot) for slot in (fetch.slot, fetch.source))
            # Both ranks cut the bytes at the same places, where one tensor of the expert ends.
            cuts = list(self._cuts(command))
            if source == self._rank:
                parts = layer.expert_bytes(fetch.source)
                sent = [(parts[number][first:last], offset) for number, first, last, offset in cuts]
                if to == source:
                    for memory, offset in sent:
                        fetched[offset : offset + len(memory)].copy_(memory)
                else:
                    sends += [Send(memory, to, offset) for memory, offset in sent]
            elif to == self._rank:
                receives += [
                    Receive(source, offset, offset + last - first) for _, first, last, offset in cuts
                ]
        self._transport.exchange(command.region, sends, receives)

    def _prepare(self, layer: PlacedExperts, command: MoveCommand) -> None:
        if any(fetch.slot in layer.slots for fetch in command.fetches):
            layer.prepare(command.start, self._fetched(command))

    def _switch(self, layer: PlacedExperts, command: MoveCommand) -> None:
        physical = list(layer.tables.physical)
        for fetch in command.fetches:
            physical[fetch.slot] = fetch.expert
            if fetch.slot in layer.slots:
                layer.replace(fetch.slot, self._fetched(command))
        layer.switch(physical)

    def _fetched(self, command: MoveCommand) -> Sequence[Tensor]:
        """The expert that this rank has fetched, as `expert_bytes`."""
        sizes = self._sizes[command.model]
        parts: Sequence[Tensor] = torch.split(self._transport.fetched(command.region)[: sum(sizes)], sizes)
        return parts

    def _cuts(self, command: MoveCommand) -> Iterator[tuple[int, int, int, int]]:
        """The bytes of a command by tensor: its number, the first and last byte there, and the offset."""
        for number, (start, end) in enumerate(pairwise(accumulate(self._sizes[command.model], initial=0))):
            first, last = max(command.start, start), min(command.end, end)
            if first < last:
                yield number, first - start, last - start, first

    def _rank_of(self, layer: PlacedExperts, slot: int) -> int:
        return next(rank for rank, slots in enumerate(layer.tables.slots_of_rank) if slot in slots)


def check_moves(model: ModelSettings, weights: ExpertWeights, moves: bool) -> None:
    """Raise ValueError if experts are to move that have biases, which do not."""
    if moves and weights.biases is not None:
        expected = "expected, with placement.policy, experts without biases"
        raise ValueError(f"model {model.name}: {expected}, got biases of the experts")
