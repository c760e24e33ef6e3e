"""The placements of all models, as ranks hold them or will when they start again, and the loads for plans."""

import json
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import Store

from expertd.service.moe.placement import Placement, contiguous_placement
from expertd.service.settings.model import Settings

_KEY = "placements"


def read_placements(store: Store) -> list[list[int]]:
    """The expert of each physical expert, for each model, as `PlacementStore.begin` told this group."""
    placements: list[list[int]] = json.loads(store.get(_KEY))
    return placements


def group_store(store: Store, generation: int) -> Store:
    """The part of the store that one group of ranks uses."""
    return dist.PrefixStore(str(generation), store)  # type: ignore[attr-defined]


class PlacementStore:
    """One placement for each model, contiguous at first. Safe from any thread."""

    def __init__(self, settings: Settings) -> None:
        ranks, more = settings.num_ranks, settings.placement.replicas
        self._placements = [
            contiguous_placement(model.num_experts, ranks, model.num_experts + more)
            for model in settings.models
        ]
        self._generation = 0
        self._lock = threading.Lock()

    def begin(self, generation: int, store: Store) -> None:
        """Tell a new group of ranks, in its store, what to load. Raises RuntimeError.

        From here on, `set` takes changes of this group only.
        """
        with self._lock:
            self._generation = generation
            held = self._held()
        store.set(_KEY, json.dumps(held))

    def get(self, model: int) -> Placement:
        """The present placement of a model."""
        return self._placements[model]

    def set(self, generation: int, model: int, placement: Placement) -> None:
        """All ranks of a group have gone over to a placement; if they are gone meanwhile, it is gone, too."""
        with self._lock:
            if generation == self._generation:
                self._placements[model] = placement

    def _held(self) -> list[list[int]]:
        return [placement.physical_to_logical.tolist() for placement in self._placements]


class LoadWindow:
    """Loads of a layer's experts; `note` is for one thread at a time, the rest is safe from any.

    half_life  seconds until a load counts half
    activated  a load is a step in which the expert got any token; else it is a token
    """

    def __init__(
        self,
        num_experts: int,
        half_life: float,
        activated: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._half_life, self._activated, self._clock = half_life, activated, clock
        self._noted = clock()
        self._loads = np.zeros(num_experts)  # replaced as a whole: others read it

    def note(self, tokens_by_rank: Sequence[NDArray[np.int64]]) -> None:
        """Count a step: the tokens of each expert on each rank."""
        tokens = np.sum(tokens_by_rank, axis=0)
        now = self._clock()
        kept = self._loads * 0.5 ** ((now - self._noted) / self._half_life)
        self._noted = now
        self._loads = kept + (tokens > 0 if self._activated else tokens)

    def loads(self) -> NDArray[np.float64]:
        """float64 [num_experts], as of the last step."""
        return self._loads


def load_windows(settings: Settings) -> list[LoadWindow]:
    """One for each model."""
    half_life, activated = settings.placement.interval_seconds, settings.placement.objective == "activated"
    return [LoadWindow(model.num_experts, half_life, activated) for model in settings.models]
