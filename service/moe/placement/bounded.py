"""A better placement by few moves: the step that gains most, again and again."""

import heapq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from expertd.service.moe.placement.placement import Placement

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
# A move must lower a layer's measure by this part of the layer's mean load.
LEAST_GAIN = 3e-4
# The measure is the norm of the ranks' loads with this exponent: nearly the largest load, but it also falls
# if one of several equally loaded ranks is relieved.
EXPONENT = 16


@dataclass(frozen=True)
class _Step:
    """Slots that get other experts, one move each, and how much the measure falls by move."""

    gain: float
    slots: tuple[int, ...]
    experts: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer: physical experts [slots], which `apply` changes, their ranks and nodes; loads [experts]."""

    slots: Ints
    ranks: Ints
    nodes: Ints
    loads: Floats

    def best_step(self, most_moves: int) -> _Step | None:
        """The step of at most `most_moves` moves that gains most by move; None if none gains enough."""
        held = np.zeros((len(self.loads), int(self.ranks[-1]) + 1))
        np.add.at(held, (self.slots, self.ranks), 1)
        counts = held.sum(axis=1)
        load: Floats = np.bincount(self.ranks, (self.loads / counts)[self.slots], held.shape[1]).astype(
            np.float64
        )
        heavy = int(load.argmax())
        steps = [self._replacement(held, load, heavy)] if most_moves >= 1 else []
        steps += [self._exchange(held, load, heavy)] if most_moves >= 2 else []
        best = max((step for step in steps if step), key=lambda step: step.gain, default=None)
        return best if best and best.gain > LEAST_GAIN * load.mean() else None

    def apply(self, step: _Step) -> None:
        self.slots[list(step.slots)] = step.experts

    def _replacement(self, held: Floats, load: Floats, heavy: int) -> _Step | None:
        """The best slot to take from an expert with several replicas, for another expert."""
        counts = held.sum(axis=1)
        near = self.nodes == self.nodes[self.ranks == heavy][0]
        # Another replica of an expert of the heavy rank, or for the heavy rank another expert.
        given = (held[:, heavy] > 0)[None, :] & (self.ranks != heavy)[:, None]
        given |= np.isin(np.arange(len(held)), self.slots[near])[None, :] & (self.ranks == heavy)[:, None]
        given &= held[:, self.ranks].T == 0
        slot, new = np.nonzero(given & (near & (counts[self.slots] > 1))[:, None])
        if not len(slot):
            return None
        old, rank = self.slots[slot], self.ranks[slot]
        less, more = self.loads[old] / (counts[old] - 1), self.loads[new] / (counts[new] + 1)
        loads = load + held[old] * (less - self.loads[old] / counts[old])[:, None]
        loads += held[new] * (more - self.loads[new] / counts[new])[:, None]
        loads[np.arange(len(slot)), rank] += more - less
        measures = _norm(loads)
        best = int(measures.argmin())
        return _Step(float(_norm(load) - measures[best]), (int(slot[best]),), (int(new[best]),))

    def _exchange(self, held: Floats, load: Floats, heavy: int) -> _Step | None:
        """The best expert of the heavy rank to exchange with one of another rank."""
        share = self.loads / held.sum(axis=1)
        here = np.flatnonzero(self.ranks == heavy)
        there = np.flatnonzero((self.ranks != heavy) & (self.nodes == self.nodes[here[0]]))
        out, back = self.slots[here], self.slots[there]
        possible = held[out][:, self.ranks[there]] == 0
        possible &= (held[back, heavy] == 0)[None, :] & (share[out][:, None] > share[back])
        i, j = np.nonzero(possible)
        if not len(i):
            return None
        a, b = here[i], there[j]
        moved = share[self.slots[a]] - share[self.slots[b]]
        loads = np.repeat(load[None], len(i), axis=0)
        loads[:, heavy] -= moved
        loads[np.arange(len(i)), self.ranks[b]] += moved
        measures = _norm(loads)
        best = int(measures.argmin())
        slots = (int(a[best]), int(b[best]))
        gain = float(_norm(load) - measures[best]) / 2
        return _Step(gain, slots, (int(self.slots[slots[1]]), int(self.slots[slots[0]])))


def improve(
    placement: Placement, loads: Floats, layers: Ints, max_moves: int, num_nodes: int
) -> tuple[Placement, int]:
    """The placement after at most `max_moves` moves in some layers, and the moves.

    loads   float64 [num_layers, num_experts]
    layers  the layers that may change

    The step that gains most by move, in any of them, is taken first. A step gives a slot of an expert with
    several replicas to another expert (one move), or exchanges two experts (two); it relieves the most loaded
    rank of its layer, and stays within that rank's node.
    """
    slots = placement.physical_to_logical.copy()
    ranks = placement.rank_of_slot()
    nodes = ranks // (placement.num_ranks // num_nodes)
    # Relative to the largest load, no sum overflows; layers stay comparable.
    relative = loads / (loads.max() or 1.0)
    parts = {i: _Layer(slots[i], ranks, nodes, relative[i]) for i in layers.tolist()}
    # The largest gain first; the number of the layer decides between equal ones.
    waiting = [(-step.gain, i, step) for i, part in parts.items() if (step := part.best_step(max_moves))]
    heapq.heapify(waiting)
    left = max_moves
    while waiting:
        _, i, step = heapq.heappop(waiting)
        if len(step.slots) <= left:
            parts[i].apply(step)
            left -= len(step.slots)
        if following := parts[i].best_step(left):
            heapq.heappush(waiting, (-following.gain, i, following))
    return replace(placement, physical_to_logical=slots), max_moves - left


def _norm(loads: Floats) -> Floats:
    """A norm along the last axis that is close to the maximum."""
    largest = loads.max(axis=-1)
    relative = loads / np.maximum(largest, np.finfo(np.float64).tiny)[..., None]
    norm: Floats = largest * (relative**EXPONENT).sum(axis=-1) ** (1 / EXPONENT)
    return norm
