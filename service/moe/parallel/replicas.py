"""Which physical expert serves each slot of a token, on the device; all ranks hold the same tables."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from expertd.service.moe.shape import LayerShape
from expertd.service.moe.split import part_of, split_experts

# 2^32 divided by the golden ratio: its multiples spread evenly, however many there are.
GOLDEN = 2654435769


class ReplicaTables:
    """The physical experts of a layer, rank after rank; their tensors keep their addresses when they change.

    num_experts  E of the layer; an id of another expert, or of one without a physical expert, names none
    physical     the expert of each physical expert
    slots        physical experts of each rank

    Raises ValueError unless `slots` add up to the number of physical experts.
    """

    def __init__(
        self, num_experts: int, physical: Sequence[int], slots: Sequence[int], device: torch.device
    ) -> None:
        if sum(slots) != len(physical):
            raise ValueError(f"slots: expected {len(physical)} in all, got {sum(slots)}")
        bounds = [range(*pair) for pair in pairwise(accumulate(slots, initial=0))]
        self.num_experts = num_experts
        self.physical = list(physical)
        self.slots_of_rank = bounds
        most = len(physical) - len(set(physical)) + 1  # an expert has no more, with any placement
        self._replicas = torch.full((num_experts + 1, most), -1, dtype=torch.int32, device=device)
        self._counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=device)
        # Slots that name no expert have number -1, the last of this table: no rank.
        owners = [rank for rank, part in enumerate(bounds) for _ in part]
        self._owners = torch.tensor([*owners, len(slots)], device=device)
        self.replace(self.physical)

    def replace(self, physical: Sequence[int]) -> None:
        """Go over to another placement of the same size. Raises ValueError (name, expected, got)."""
        if len(physical) != len(self.physical) or set(physical) != set(self.physical):
            expected = f"{len(self.physical)} replicas of the same experts"
            raise ValueError(f"physical: expected {expected}, got others")
        replicas: list[list[int]] = [[] for _ in range(self.num_experts + 1)]
        for number, expert in enumerate(physical):
            replicas[expert].append(number)
        most = self._replicas.shape[1]
        table = [numbers + [-1] * (most - len(numbers)) for numbers in replicas]
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
        return self._owners[physical.to(torch.int64)]


def tables_of(
    shape: LayerShape, num_ranks: int, physical: Sequence[int] | None, device: torch.device
) -> ReplicaTables:
    """Those of a placement of all of the layer's experts, or of the contiguous split. Raises ValueError."""
    held = shape.held_experts
    if physical is None:
        parts = split_experts(held, num_ranks)
        return ReplicaTables(shape.num_experts, held, [len(part) for part in parts], device)
    if set(physical) != set(held):
        different = sorted(set(physical) ^ set(held))[:4]
        raise ValueError(f"physical: expected each expert of the layer and no other, got {different} wrong")
    slots = [len(part_of(len(physical), rank, num_ranks)) for rank in range(num_ranks)]
    if slots[0] > shape.num_experts:
        raise ValueError(f"physical: expected at most {shape.num_experts} on a rank, got {slots[0]}")
    return ReplicaTables(shape.num_experts, physical, slots, device)
