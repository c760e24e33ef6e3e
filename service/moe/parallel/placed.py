"""The experts of a layer on its ranks: which one serves each slot of a token, a rank's weights, and moves."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from expertd.kernels import Backend, Weights
from expertd.kernels.ops.four_bits import of_tensors, tensors_of
from expertd.service.moe.expert_store import ExpertStore
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.split import experts_of_rank, parts_of
from expertd.service.moe.weights import MATRICES, ExpertWeights

# 2^32 divided by the golden ratio: its multiples spread evenly, however many there are.
GOLDEN = 2654435769


class ReplicaTables:
    """The physical experts of a layer, rank after rank; their tensors keep their addresses when they change.

    num_experts  E of the layer; an id of another expert, or of one without a physical expert, names none
    physical     the expert of each physical expert
    num_ranks    which hold `parts_of` them

    places       int32 [physical experts], rank * 65536 + group there
    """

    def __init__(
        self, num_experts: int, physical: Sequence[int], num_ranks: int, device: torch.device
    ) -> None:
        self.num_experts = num_experts
        self.physical = list(physical)
        self.slots_of_rank = parts_of(len(physical), num_ranks)
        places = [rank << 16 | at for rank, part in enumerate(self.slots_of_rank) for at in range(len(part))]
        # Slots that name no expert have number -1, the last of this table: no rank.
        self._places = torch.tensor([*places, num_ranks << 16], dtype=torch.int32, device=device)
        self.places = self._places[:-1]
        max_replicas = len(physical) - len(set(physical)) + 1  # an expert has no more, with any placement
        self._replicas = torch.full((num_experts + 1, max_replicas), -1, dtype=torch.int32, device=device)
        self._counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        self.replace(self.physical)

    def replace(self, physical: Sequence[int]) -> None:
        """Go over to another placement of the same size. Raises ValueError (name, expected, got)."""
        if len(physical) != len(self.physical) or set(physical) != set(self.physical):
            expected = f"{len(self.physical)} replicas of the same experts"
            raise ValueError(f"physical: expected {expected}, got others")
        replicas: list[list[int]] = [[] for _ in range(self.num_experts + 1)]
        for number, expert in enumerate(physical):
            replicas[expert].append(number)
        max_replicas = self._replicas.shape[1]
        table = [numbers + [-1] * (max_replicas - len(numbers)) for numbers in replicas]
        self._replicas.copy_(torch.tensor(table, dtype=torch.int32))
        self._counts.copy_(torch.tensor([len(numbers) for numbers in replicas]))
        self.physical = list(physical)

    def choose(self, topk_ids: Tensor, positions: Tensor) -> Tensor:
        """The physical expert of each slot, int32 [T, top_k]; -1: none.

        topk_ids   int32 [T, top_k]
        positions  int64 [T]: a token's row in its step, or for all tokens the number of the step

        Replica floor(count * h / 2^32) with h = (position + expert) * GOLDEN mod 2^32. It depends on nothing
        else, so all ranks choose the same one. If the position is the row, a step's tokens are spread over
        the replicas. If it is the number of the step, all tokens of one step use one replica: then a step
        activates no more experts than without replicas, which suits decode.
        """
        known = (topk_ids >= 0) & (topk_ids < self.num_experts)
        experts = torch.where(known, topk_ids, self.num_experts).to(torch.int64)
        if self._replicas.shape[1] == 1:
            return self._replicas[experts, 0]
        mixed = (positions[:, None] + experts) * GOLDEN & 0xFFFFFFFF  # an overflow leaves these bits alone
        return self._replicas[experts, mixed * self._counts[experts] >> 32]

    def owners(self, physical: Tensor) -> Tensor:
        """int64, the rank of each physical expert; the number of ranks for -1."""
        return self._places[physical.to(torch.int64)].to(torch.int64) >> 16


def tables_of(
    shape: LayerShape, num_ranks: int, physical: Sequence[int] | None, device: torch.device
) -> ReplicaTables:
    """Those of a placement of all of the layer's experts; None: of one replica each. Raises ValueError."""
    held = shape.held_experts
    physical = held if physical is None else physical
    if set(physical) != set(held):
        different = sorted(set(physical) ^ set(held))[:4]
        raise ValueError(f"physical: expected each expert of the layer and no other, got {different} wrong")
    num_slots = len(experts_of_rank(physical, 0, num_ranks))
    if num_slots > len(held):
        raise ValueError(f"physical: expected at most {len(held)} on a rank, got {num_slots}")
    return ReplicaTables(shape.num_experts, physical, num_ranks, device)


class PlacedExperts:
    """The physical experts of one rank. All tensors keep their addresses, also those of `tables`.

    tables   which physical expert serves which slot of a token; see `tables_of`
    weights  those of the rank's physical experts, as the backend gets them
    shared   the shared experts' part of the same tensors, which never changes
    store    has the physical experts in the host's memory; None: `weights` has them

    slots    the numbers of the rank's physical experts
    held     int64 [slots] on the host, the expert of each
    """

    def __init__(
        self,
        tables: ReplicaTables,
        rank: int,
        weights: ExpertWeights,
        shared: ExpertWeights,
        backend: Backend,
        store: ExpertStore | None = None,
    ) -> None:
        device = weights.router.device
        self.tables, self.slots = tables, tables.slots_of_rank[rank]
        self._weights = weights if store is None else store.in_host_memory(weights)
        self._shared, self._backend, self._store = shared, backend, store
        self._prepared: list[object] = [None] * len(MATRICES)
        self._position = torch.zeros((), dtype=torch.int64, device=device)
        self._by_row = torch.ones((), dtype=torch.int64, device=device)
        self.switch(tables.physical)

    def forget(self, name: str) -> None:
        """Hold no data of one of the MATRICES any more: experts that never move."""
        self._weights, self._shared = (part.without_matrix(name) for part in (self._weights, self._shared))

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

    def expert_bytes(self, slot: int) -> list[Tensor]:
        """The tensors of each of an expert's MATRICES: views of their memory, uint8 [n] each."""
        group = slot - self.slots.start
        parts = [part for matrix in self._matrices(self._weights) for part in tensors_of(matrix)]
        return [part[group].view(torch.uint8).flatten() for part in parts]

    def prepare(self, matrix: int, parts: Sequence[Tensor]) -> None:
        """Do what `replace` would otherwise have to, for `MATRICES[matrix]` of an expert.

        parts  as `expert_bytes`, of all matrices
        """
        if self._store is not None:  # which does it whenever it copies the expert
            return
        weights = self._matrices(self._weights)
        first = sum(len(tensors_of(before)) for before in weights[:matrix])
        group = of_tensors(
            weights[matrix], lambda own, given: given.view(own.dtype).view(own.shape[1:]), parts[first:]
        )
        pairs = MATRICES[matrix] == "gate_up"
        self._prepared[matrix] = self._backend.prepare_weights(group, pairs=pairs)

    def replace(self, slot: int, parts: Sequence[Tensor]) -> None:
        """Write the weights of a physical expert, all of whose matrices are prepared; between two steps.

        parts  as `expert_bytes`
        """
        for target, part in zip(self.expert_bytes(slot), parts, strict=True):
            target.copy_(part)
        groups = [slot - self.slots.start]
        if self._store is not None:
            self._store.changed(*groups)
            return
        for weights, prepared in zip(self._matrices(self._weights), self._prepared, strict=True):
            self._backend.weights_changed(weights, groups, [prepared])
        for weights in self._matrices(self._shared):
            self._backend.weights_changed(weights, [], [])
        self._prepared = [None] * len(MATRICES)

    @staticmethod
    def _matrices(weights: ExpertWeights) -> tuple[Weights, ...]:
        return tuple(getattr(weights, name) for name in MATRICES)
