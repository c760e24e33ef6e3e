"""Better placements step by step: two experts change places, or a spare replica becomes another expert's."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from expertd.service.moe.placement.placement import Floats, Ints

# A move must lower the measure by this part of the mean load.
MIN_GAIN = 3e-4
# Exchanges of a placement that is being made cost nothing: they need gain no more than rounding.
ROUNDING_GAIN = 1e-10
MAX_EXCHANGES = 32


class SearchStep(NamedTuple):
    """Slots that get other experts, one move each, and how much the measure falls by move."""

    gain: float
    slots: tuple[int, ...]
    experts: tuple[int, ...]


@dataclass(eq=False)
class Search:
    """One layer's physical experts [slots], which steps change in place; no step brings an expert to a rank
    that holds it already.

    slots  int64 [num_physical], the expert of each
    ranks  int64 [num_physical], the rank of each
    loads  float64 [num_experts], relative to the largest, so that no sum overflows

    The measure is a norm of the ranks' loads: nearly the largest load, but it also falls if one of several
    equally loaded ranks is relieved.
    """

    slots: Ints
    ranks: Ints
    loads: Floats

    def __post_init__(self) -> None:
        self._count()

    def separate(self) -> None:
        """Exchange experts until no rank holds one twice, where single exchanges can do that."""
        for slot in np.flatnonzero(self._held[self.slots, self.ranks] > 1).tolist():
            if self._held[self.slots[slot], self.ranks[slot]] > 1:
                step = self._exchange(np.array([slot]))
                if step is not None:
                    self._apply(step)

    def level(self, enough: float) -> None:
        """Exchange experts of the most loaded rank while that gains, until its load is `enough`."""
        for _ in range(MAX_EXCHANGES):
            step = self._exchange(self._heavy()) if self.load.max() > enough else None
            if step is None or step.gain <= ROUNDING_GAIN * self.load.mean():
                return
            self._apply(step)

    def improve(self, max_moves: int) -> int:
        """Take the step that gains most by move, again and again; how many moves that were.

        A step relieves the most loaded rank. It gives a slot of an expert with several replicas to another
        expert (one move), or exchanges two experts (two).
        """
        left = max_moves
        while left:
            steps = [self._replacement(), self._exchange(self._heavy()) if left >= 2 else None]
            best = max((step for step in steps if step), key=lambda step: step.gain, default=None)
            if best is None or best.gain <= MIN_GAIN * self.load.mean():
                break
            self._apply(best)
            left -= len(best.slots)
        return max_moves - left

    def _count(self) -> None:
        self._held = np.zeros((len(self.loads), int(self.ranks[-1]) + 1))
        np.add.at(self._held, (self.slots, self.ranks), 1)
        self._share = self.loads / self._held.sum(axis=1)
        self.load: Floats = self._share @ self._held

    def _apply(self, step: SearchStep) -> None:
        self.slots[list(step.slots)] = step.experts
        self._count()

    def _heavy(self) -> Ints:
        """The slots of the most loaded rank."""
        return np.flatnonzero(self.ranks == self.load.argmax())

    def _exchange(self, here: Ints) -> SearchStep | None:
        """The best exchange of one of these slots of one rank with a slot of another."""
        rank = self.ranks[here[0]]
        there = np.flatnonzero(self.ranks != rank)
        possible = self._held[self.slots[here]][:, self.ranks[there]] == 0
        possible &= (self._held[self.slots[there], rank] == 0)[None, :]
        i, j = np.nonzero(possible)
        if not len(i):
            return None
        a, b = here[i], there[j]
        moved = self._share[self.slots[a]] - self._share[self.slots[b]]
        loads = np.repeat(self.load[None], len(i), axis=0)
        loads[:, rank] -= moved
        loads[np.arange(len(i)), self.ranks[b]] += moved
        measures = _norm(loads)
        best = int(measures.argmin())
        slots = (int(a[best]), int(b[best]))
        gain = float(_norm(self.load) - measures[best]) / 2
        return SearchStep(gain, slots, (int(self.slots[slots[1]]), int(self.slots[slots[0]])))

    def _replacement(self) -> SearchStep | None:
        """The best slot to take from an expert with several replicas, for another expert."""
        held, heavy = self._held, int(self.load.argmax())
        counts = held.sum(axis=1)
        # Another replica of an expert of the heavy rank, or for the heavy rank any other expert.
        given = (held[:, heavy] > 0)[None, :] | (self.ranks == heavy)[:, None]
        given &= (held[:, self.ranks].T == 0) & (counts[self.slots] > 1)[:, None]
        slot, new = np.nonzero(given)
        if not len(slot):
            return None
        old, rank = self.slots[slot], self.ranks[slot]
        less, more = self.loads[old] / (counts[old] - 1), self.loads[new] / (counts[new] + 1)
        loads = self.load + held[old] * (less - self._share[old])[:, None]
        loads += held[new] * (more - self._share[new])[:, None]
        loads[np.arange(len(slot)), rank] += more - less
        measures = _norm(loads)
        best = int(measures.argmin())
        return SearchStep(float(_norm(self.load) - measures[best]), (int(slot[best]),), (int(new[best]),))


def _norm(loads: Floats) -> Floats:
    """The norm with exponent 16 along the last axis."""
    largest = loads.max(axis=-1)
    relative = loads / np.maximum(largest, np.finfo(np.float64).tiny)[..., None]
    for _ in range(4):
        relative *= relative
    norm: Floats = largest * relative.sum(axis=-1) ** (1 / 16)
    return norm
