"""The placements of all models, as the ranks hold them, or will when they are started again."""

import hashlib
import json
import threading
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from expertd.service.moe.placement import Placement, contiguous_placement, cyclic_placement
from expertd.service.settings.model import Settings

_KEY = "placements"


def read_placements(store: Store) -> list[list[int]]:
    """The expert of each physical expert, for each model, as `PlacementStore.begin` told this group."""
    placements: list[list[int]] = json.loads(store.get(_KEY))
    return placements


def digest(placements: Sequence[Sequence[int]]) -> str:
    """Tells whether two processes have the same placements, those of `read_placements`."""
    return hashlib.blake2b(json.dumps(placements).encode(), digest_size=16).hexdigest()


def group_store(store: Store, generation: int) -> Store:
    """The part of the store that one group of ranks uses."""
    return dist.PrefixStore(str(generation), store)  # type: ignore[attr-defined]


class PlacementStore:
    """One placement for each model, contiguous or cyclic at first. Safe from any thread."""

    def __init__(self, settings: Settings) -> None:
        ranks, more = settings.num_ranks, settings.placement.replicas
        # Replicas of an expert on different ranks can stand for each other.
        first = cyclic_placement if settings.on_rank_loss == "shrink" else contiguous_placement
        self._placements = [
            first(1, model.num_experts, ranks, model.num_experts + more) for model in settings.models
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

    def digest(self) -> str:
        """The `digest` of all placements."""
        with self._lock:
            return digest(self._held())

    def are_held_by(self, ranks: Sequence[int]) -> bool:
        """Whether every expert of every model has a replica on one of these ranks."""
        with self._lock:
            return all(
                placement.num_experts
                == len(np.unique(np.concatenate([placement.experts_of_rank(0, rank) for rank in ranks])))
                for placement in self._placements
            )

    def _held(self) -> list[list[int]]:
        return [placement.physical_to_logical[0].tolist() for placement in self._placements]
