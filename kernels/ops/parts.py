"""A part of a layer's experts, for calls whose weights come one part after another, and where groups are."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from expertd.kernels.ops.biases import ExpertBiases
from expertd.kernels.ops.four_bits import Weights


class ExpertPart(NamedTuple):
    """Consecutive groups: gate_up [G, 2I, H], down [G, H, I] and biases, as in `fused_experts`."""

    gate_up: Weights
    down: Weights
    biases: ExpertBiases | None = None

    @property
    def matrices(self) -> tuple[Weights, Weights]:
        """gate_up and down."""
        return self.gate_up, self.down

    @property
    def num_groups(self) -> int:
        """G."""
        return self.down.data.shape[0]


class GroupTable(NamedTuple):
    """The groups of ids, which the device looks up: they may change between calls, also of a CUDA graph.

    groups  int32 [N] on the device: the group of each id; -1: none at present. Other ids have none
    seen    int32 [1 + T * top_k], or longer, which the host can read: pinned, or a CPU's. A call writes its
            ids from the second on, and 1 to the first if one of 0 to N - 1 has no group: its output is then
            undefined. It never writes 0 there
    """

    groups: Tensor
    seen: Tensor

    def groups_of(self, ids: Tensor) -> Tensor:
        """The groups of ids int32 [T, top_k], in PyTorch; of ids that are not in the table, any."""
        known = ids.flatten().clamp(0, len(self.groups) - 1)
        return self.groups.index_select(0, known).view(ids.shape)

    def find(self, ids: Tensor) -> Tensor:
        """As a call does, in PyTorch: the groups of ids int32 [T, top_k], -1: none. Waits for the device."""
        known = (ids >= 0) & (ids < len(self.groups))
        found = self.groups_of(ids).masked_fill(~known, -1)
        self.seen[1 : 1 + ids.numel()].copy_(ids.flatten(), non_blocking=True)
        if (known & (found < 0)).any():
            self.seen[0] = 1
        return found


class PartsOfRank(NamedTuple):
    """A rank's experts for one call of `Backend.parallel_experts_in_parts`, one part after another.

    parts    P groups in all, as in `fused_experts_in_parts`; experts with rows are in one of them
    offsets  int32 [P + 1] on the device: group p has rows offsets[p]:offsets[p + 1]
    shifts   int32 [G] on the device: what is added to the rows' numbers of each of the rank's experts
    """

    parts: Iterable[ExpertPart]
    offsets: Tensor
    shifts: Tensor

    def rows(self, inverse: Tensor, offsets: Tensor) -> Tensor:
        """The rows of pairs in these groups, as `inverse` has them in those of the rank's experts.

        inverse  int32 of any shape, -1: none
        offsets  int32 [G + 1], for it
        """
        experts = torch.searchsorted(offsets[1:], inverse, right=True, out_int32=True)
        experts.clamp_(max=len(self.shifts) - 1)  # of undefined rows, too: a rank may be late
        shifts = self.shifts.index_select(0, experts.flatten()).view_as(inverse)
        return torch.where(inverse < 0, -1, inverse + shifts)
