"""The sizes of one MoE layer."""

from dataclasses import dataclass

from expertd.limits import HIDDEN_STEP, MAX_EXPERTS, MAX_GROUPS, SCALE_BLOCK
from expertd.weight_format import FP8_BLOCKS, WeightLayout


@dataclass(frozen=True)
class LayerShape:
    """Sizes of a layer: hidden_size H, intermediate_size I, num_experts E, experts per token top_k.

    num_shared_experts  experts of size I that every token uses, with weight 1; a model's single shared
                        expert of size S*I equals S of these
    local_experts       which of the E experts are held here; None: all. The others add nothing to the output,
                        so the outputs of layers with disjoint parts sum to the whole layer's output
    weight_layout       of the routed experts' matrices
    shared_layout       of the shared ones'

    Raises ValueError (name, expected, got) for unsupported sizes.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    local_experts: range | None = None
    weight_layout: WeightLayout = FP8_BLOCKS
    shared_layout: WeightLayout = FP8_BLOCKS

    def __post_init__(self) -> None:
        for name, step in (("hidden_size", HIDDEN_STEP), ("intermediate_size", SCALE_BLOCK)):
            value = getattr(self, name)
            if value < SCALE_BLOCK or value % step != 0:
                expected = f"a multiple of {step}, at least {SCALE_BLOCK}"
                raise ValueError(f"{name}: expected {expected}, got {value}")
        if not 1 <= self.num_experts <= MAX_EXPERTS:
            raise ValueError(f"num_experts: expected 1 to {MAX_EXPERTS}, got {self.num_experts}")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k: expected 1 to num_experts ({self.num_experts}), got {self.top_k}")
        if self.num_shared_experts < 0:
            raise ValueError(f"num_shared_experts: expected at least 0, got {self.num_shared_experts}")
        held = self.held_experts
        if held.step != 1 or not 0 <= held.start < held.stop <= self.num_experts:
            got = f"{held.start}-{held.stop - 1}" if held.step == 1 and held else str(held)
            raise ValueError(f"local_experts: expected a range of 0 to {self.num_experts - 1}, got {got}")
        if self.num_groups > MAX_GROUPS:
            expected = f"at most {MAX_GROUPS} experts including the local ones"
            raise ValueError(f"num_shared_experts: expected {expected}, got {self.num_groups}")

    @property
    def held_experts(self) -> range:
        """The routed experts that are held here."""
        return range(self.num_experts) if self.local_experts is None else self.local_experts

    @property
    def is_part(self) -> bool:
        """Whether some of the routed experts are held elsewhere."""
        return len(self.held_experts) < self.num_experts

    @property
    def expert_bytes(self) -> int:
        """Bytes of a routed expert's weights on a device, scales included."""
        return self._bytes_in(self.weight_layout)

    @property
    def shared_expert_bytes(self) -> int:
        """Bytes of a shared expert's weights on a device, scales included."""
        return self._bytes_in(self.shared_layout)

    @property
    def bias_bytes(self) -> int:
        """Bytes of an expert's biases on a device, if it has some."""
        return 2 * (2 * self.intermediate_size + self.hidden_size)

    @property
    def weight_layouts(self) -> dict[WeightLayout, int]:
        """The groups of each layout."""
        counts = {self.weight_layout: len(self.held_experts)}
        if self.num_shared_experts > 0:
            counts[self.shared_layout] = counts.get(self.shared_layout, 0) + self.num_shared_experts
        return counts

    @property
    def splits_shared(self) -> bool:
        """Whether the shared experts' matrices are in tensors of their own: in another layout."""
        return self.num_shared_experts > 0 and self.shared_layout != self.weight_layout

    @property
    def has_whole_blocks(self) -> bool:
        """Whether every scale of a token stands for as many columns."""
        return self.hidden_size % SCALE_BLOCK == 0

    @property
    def pair_flops(self) -> int:
        """Floating-point operations of an expert's two GEMMs for one token."""
        return 6 * self.hidden_size * self.intermediate_size

    @property
    def num_groups(self) -> int:
        """Groups G of the grouped GEMMs: the held experts, then the shared ones."""
        return len(self.held_experts) + self.num_shared_experts

    def _bytes_in(self, layout: WeightLayout) -> int:
        h, i = self.hidden_size, self.intermediate_size
        return layout.num_bytes(2 * i, h, pairs=True) + layout.num_bytes(h, i)
