"""A part of a layer's experts, for calls whose weights come one part after another."""

from typing import NamedTuple

from expertd.kernels.ops.four_bits import Weights


class ExpertPart(NamedTuple):
    """Consecutive groups: gate_up [G, 2I, H] and down [G, H, I], as in `fused_experts`."""

    gate_up: Weights
    down: Weights

    @property
    def num_groups(self) -> int:
        """G."""
        return self.down.data.shape[0]
