"""The experts of a layer on one rank: which they are, their weights as bytes, and going over to others."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from expertd.kernels import Backend, Quantized
from expertd.service.moe.parallel.replicas import ReplicaTables
from expertd.service.moe.split import part_of
from expertd.service.moe.weights import MATRICES, ExpertWeights, without_data


class PlacedExperts:
    """The physical experts of one rank. All tensors keep their addresses, also those of `tables`.

    tables   which physical expert serves which slot of a token; see `tables_of`
    weights  those of the rank's physical experts, as the backend gets them
    shared   the shared experts' part of the same tensors, which never changes

    slots    the numbers of the rank's physical experts
    places   int32 [physical experts], rank * 65536 + group there
    experts  int64 [slots], the expert of each slot
    held     the same on the host
    """

    def __init__(
        self,
        tables: ReplicaTables,
        rank: int,
        weights: ExpertWeights,
        shared: ExpertWeights,
        backend: Backend,
    ) -> None:
        device = weights.router.device
        self.tables, self.slots = tables, tables.slots_of_rank[rank]
        numbers = [at for part in tables.slots_of_rank for at in range(len(part))]
        ranks = [rank for rank, part in enumerate(tables.slots_of_rank) for _ in part]
        places = torch.tensor(ranks, dtype=torch.int32) << 16 | torch.tensor(numbers, dtype=torch.int32)
        self.places = places.to(device)
        self.experts = torch.zeros(len(self.slots), dtype=torch.int64, device=device)
        self._weights, self._shared, self._backend = weights, shared, backend
        self._prepared: list[object] = [None] * len(MATRICES)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._by_row = torch.ones((), dtype=torch.int64, device=device)
        self.switch(tables.physical)

    def forget(self, name: str) -> None:
        """Hold no data of one of the MATRICES any more: experts that never move."""
        self._weights, self._shared = (
            part.with_matrix(name, without_data(part.matrix(name))) for part in (self._weights, self._shared)
        )

    def begin_step(self, position: int, by_row: bool = True) -> None:
        """Say where the next call's tokens are, as `ReplicaTables.choose` counts positions.

        position  of this rank's first token
        by_row    whether the others follow it; else all have this position, such as the step's number
        """
        self._position.fill_(position)
        self._by_row.fill_(int(by_row))

    def choose(self, topk_ids: Tensor) -> Tensor:
        """int32 [T, top_k]: the physical expert of each slot of this rank's tokens; -1: none."""
        rows = torch.arange(len(topk_ids), device=topk_ids.device)
        return self.tables.choose(topk_ids, self._position + rows * self._by_row)

    def switch(self, physical: Sequence[int]) -> None:
        """Go over to another placement of the same size, whose weights are in place; between two steps.

        Raises ValueError (name, expected, got).
        """
        self.tables.replace(physical)
        self.held = np.array(self.tables.physical[self.slots.start : self.slots.stop], np.int64)
        self.experts.copy_(torch.from_numpy(self.held))

    def expert_bytes(self, slot: int) -> list[Tensor]:
        """Data and scales of each of an expert's MATRICES: views of their memory, uint8 [n] each."""
        group = slot - self.slots.start
        parts = [part for matrix in self._matrices(self._weights) for part in matrix]
        return [part[group].view(torch.uint8).flatten() for part in parts]

    def prepare(self, matrix: int, data: Tensor, scales: Tensor) -> None:
        """Do what `replace` would otherwise have to, for `MATRICES[matrix]` of an expert; uint8 [n] both."""
        whole = self._matrices(self._weights)[matrix]
        group = Quantized(
            data.view(whole.data.dtype).view(whole.data.shape[1:]),
            scales.view(whole.scales.dtype).view(whole.scales.shape[1:]),
        )
        self._prepared[matrix] = self._backend.prepare_weights(group)

    def replace(self, slot: int, parts: Sequence[Tensor]) -> None:
        """Write the weights of a physical expert, all of whose matrices are prepared; between two steps.

        parts  as `expert_bytes`
        """
        for target, part in zip(self.expert_bytes(slot), parts, strict=True):
            target.copy_(part)
        groups = [slot - self.slots.start]
        for weights, prepared in zip(self._matrices(self._weights), self._prepared, strict=True):
            self._backend.weights_changed(weights, groups, [prepared])
        for weights in self._matrices(self._shared):
            self._backend.weights_changed(weights, [], [])
        self._prepared = [None] * len(MATRICES)

    @staticmethod
    def _matrices(weights: ExpertWeights) -> tuple[Quantized, ...]:
        return tuple(getattr(weights, name) for name in MATRICES)


def held_by(rank: int, num_ranks: int, physical: Sequence[int]) -> Sequence[int]:
    """The experts of one rank's physical experts."""
    part = part_of(len(physical), rank, num_ranks)
    return physical[part.start : part.stop]
