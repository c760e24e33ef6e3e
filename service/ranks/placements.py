"""The placements of all models, as the ranks hold them, or will when they are started again."""

import json
import threading

import torch.distributed as dist
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
            contiguous_placement(1, model.num_experts, ranks, model.num_experts + more)
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
        return [placement.physical_to_logical[0].tolist() for placement in self._placements]
