"""The order in which experts move from one placement to another, through placements that are all complete."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from expertd.service.moe.placement.changes import keep_slots
from expertd.service.moe.placement.placement import Placement


class Fetch(NamedTuple):
    """A physical expert becomes another one: its rank copies the weights of the physical expert `source`."""

    slot: int
    expert: int
    source: int


@dataclass(frozen=True, eq=False)
class Round:
    """Fetches at the same time, at most one for each rank, and the placement once all have ended.

    Sources keep their weights until then, since a rank fetches into memory beside its physical experts.
    """

    fetches: Sequence[Fetch]
    placement: Placement


class _Edge(NamedTuple):
    """`slot` loses its expert, and the rank `to` gets `expert`: the same one, or one that gains a replica."""

    slot: int
    to: int
    expert: int
    same: bool


def rounds(old: Placement, new: Placement) -> list[Round]:
    """The way from `old` to `new`. Each rank's experts are those of `new` at its end, perhaps in other slots.

    Raises ValueError (name, expected, got).

    In each round some ranks form rings: each gives up one expert and gets one, either what its neighbour
    gives up, or a replica whose like remains elsewhere. So no expert is ever without a replica, and one
    expert's memory beside its own is all that a rank needs.
    """
    wanted = keep_slots(old, new)
    packed: list[list[list[_Edge]]] = []
    busy: list[set[int]] = []
    for ring in _rings(_edges(old, wanted)):
        ranks = {edge.to for edge in ring}
        at = next((at for at, others in enumerate(busy) if not ranks & others), len(busy))
        if at == len(busy):
            busy.append(set())
            packed.append([])
        busy[at] |= ranks
        packed[at].append(ring)
    made: list[Round] = []
    placement = old
    for rings in packed:
        fetches = [fetch for ring in rings for fetch in _fetches(placement, ring)]
        held = placement.physical_to_logical.copy()
        for fetch in fetches:
            held[fetch.slot] = fetch.expert
        placement = replace(placement, physical_to_logical=held)
        made.append(Round(fetches, placement))
    return made


def _edges(old: Placement, new: Placement) -> dict[int, list[_Edge]]:
    """What each rank gives up, by rank. Every rank gives up as many experts as it gets."""
    before, after = old.physical_to_logical, new.physical_to_logical
    rank_of = old.rank_of_slot()
    leaving, coming = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for slot in np.flatnonzero(before != after).tolist():
        leaving[int(before[slot])].append(slot)
        coming[int(after[slot])].append(int(rank_of[slot]))
    edges = defaultdict[int, list[_Edge]](list)
    spare: list[int] = []
    wanted: list[tuple[int, int]] = []
    for expert in sorted({*leaving, *coming}):
        slots, ranks = leaving[expert], coming[expert]
        for slot, to in zip(slots, ranks, strict=False):
            edges[int(rank_of[slot])].append(_Edge(slot, to, expert, True))
        spare += slots[len(ranks) :]
        wanted += [(to, expert) for to in ranks[len(slots) :]]
    for slot, (to, expert) in zip(spare, wanted, strict=True):
        edges[int(rank_of[slot])].append(_Edge(slot, to, expert, False))
    return edges


def _rings(edges: dict[int, list[_Edge]]) -> Iterator[list[_Edge]]:
    """The edges, as rings through different ranks."""
    for start in list(edges):
        path: list[tuple[int, _Edge]] = []  # rank, and its edge
        rank = start
        while edges[rank] or path:
            on_path = [at for at, (other, _) in enumerate(path) if other == rank]
            if on_path:
                yield [edge for _, edge in path[on_path[0] :]]
                del path[on_path[0] :]
                continue
            edge = edges[rank].pop()
            path.append((rank, edge))
            rank = edge.to


def _fetches(placement: Placement, ring: Sequence[_Edge]) -> Iterator[Fetch]:
    """Those of a ring: what an edge brings takes the slot that the next edge frees."""
    rank_of = placement.rank_of_slot()
    freed = {int(rank_of[edge.slot]): edge.slot for edge in ring}
    held = placement.physical_to_logical.tolist()
    for edge in ring:
        source = edge.slot if edge.same else held.index(edge.expert)
        yield Fetch(freed[edge.to], edge.expert, source)
