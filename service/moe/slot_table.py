"""Which experts of a layer are in the device's slots, and which leave for others."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[np.intp]
"""Numbers of experts, or of their slots."""


@dataclass(frozen=True)
class Fetches:
    """How a step gets the experts that it needs.

    present   experts that are in slots
    fetched   experts that are copied to slots, of experts that the step does not need
    slots     the slot of each of these
    streamed  further ones, for which there is no slot
    """

    present: Experts
    fetched: Experts
    slots: Experts
    streamed: Experts


class SlotTable:
    """Which expert is in which slot; the least recently used leave first."""

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self.slot_of: Experts = np.full(num_experts, -1, np.intp)
        """The slot of each expert; -1: none."""
        self.expert_in: Experts = np.full(num_slots, -1, np.intp)
        """The expert in each slot; -1: none. Replaced by each change, and never written to."""
        self._last_used = np.zeros(num_slots, np.int64)  # the number of a step
        self._step = 0

    def has_room(self, tokens: NDArray[np.intp]) -> bool:
        """Whether all experts that a step with these tokens of each [E] needs can be in slots."""
        return int(np.count_nonzero(tokens)) <= len(self.expert_in)

    def use(self, slots: Experts, experts: Experts) -> None:
        """Note that a step used these slots, when `expert_in` was `experts`."""
        self._step += 1
        if experts is not self.expert_in:
            slots = slots[experts[slots] == self.expert_in[slots]]
        self._last_used[slots] = self._step

    def take(self, tokens: NDArray[np.intp]) -> Fetches:
        """What a step with these tokens of each expert [E] gets; the slots are its experts' from now on.

        Where more experts are missing than slots are free, those with the most tokens get them.
        """
        self._step += 1
        needed = np.flatnonzero(tokens)
        slots = self.slot_of[needed]
        present, missing = needed[slots >= 0], needed[slots < 0]
        self._last_used[self.slot_of[present]] = self._step
        free = np.argsort(self._last_used, kind="stable")[: len(self._last_used) - len(present)]
        missing = missing[np.argsort(-tokens[missing], kind="stable")]
        # In order of their numbers: copies between neighbors become one.
        fetched, streamed = np.sort(missing[: len(free)]), np.sort(missing[len(free) :])
        used = np.sort(free[: len(fetched)])
        if len(fetched):
            left, self.expert_in = self.expert_in[used], self.expert_in.copy()
            self.slot_of[left[left >= 0]] = -1
            self.expert_in[used], self.slot_of[fetched], self._last_used[used] = fetched, used, self._step
        return Fetches(present, fetched, used, streamed)

    def remove(self, expert: int) -> None:
        """No slot has this expert."""
        if (slot := self.slot_of[expert]) >= 0:
            self.expert_in = self.expert_in.copy()
            self.slot_of[expert], self.expert_in[slot], self._last_used[slot] = -1, -1, 0

    def clear(self) -> None:
        """No slot has an expert."""
        self.slot_of[:] = -1
        self.expert_in = np.full_like(self.expert_in, -1)
        self._last_used[:] = 0
