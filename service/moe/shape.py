"""The sizes of one MoE layer."""

from dataclasses import dataclass

from kernels.checks import BLOCK, MAX_GROUPS

SCALE_BLOCK = BLOCK  # elements of K to a scale; gate and up must not share a block of as many rows
MAX_EXPERTS = MAX_GROUPS


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer: hidden_size H, intermediate_size I, num_experts E, experts per token top_k.

    Raises ValueError (name, expected, got) for sizes no layer can have here.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            value = getattr(self, name)
            if value < SCALE_BLOCK or value % SCALE_BLOCK != 0:
                raise ValueError(f"{name}: expected a positive multiple of {SCALE_BLOCK}, got {value}")
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise ValueError(f"num_experts: expected 1 to {MAX_EXPERTS}, got {self.num_experts}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k: expected 1 to num_experts ({self.num_experts}), got {self.top_k}")
