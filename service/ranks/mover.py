"""A rank's side of a change of placement: it sends and receives weights, then uses the new placement."""

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from expertd.service.device import device_of
from expertd.service.moe.parallel import PlacedExperts
from expertd.service.ranks.moves import Kind, MoveCommand
from expertd.service.ranks.transport import Receive, Send, Transport


class Mover:
    """Carries out commands for the layers of `rank`.

    The expert that is fetched lies in the transport's memory until its round ends.
    """

    def __init__(self, rank: int, layers: Sequence[PlacedExperts], transport: Transport) -> None:
        self._rank, self._layers, self._transport = rank, layers, transport
        self._sizes = [[part.numel() for part in layer.expert_bytes(layer.slots.start)] for layer in layers]

    def run(self, command: MoveCommand) -> float:
        """Carry out a command; its seconds. Raises RuntimeError if a rank is gone."""
        began = time.perf_counter()
        layer = self._layers[command.model]
        match command.kind:
            case Kind.FETCH:
                self._exchange(layer, command)
            case Kind.PREPARE:
                self._prepare(layer, command)
            case Kind.SWITCH:
                self._switch(layer, command)
        # Other ranks go on, and so do this one's steps, on whichever stream.
        device_of(layer.places.device).synchronize()
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
            parts, first = self._fetched(command), 2 * command.start
            layer.prepare(command.start, *parts[first : first + 2])

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
