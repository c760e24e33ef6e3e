"""Where the weights of one MoE layer are in the files of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from expertd.service.checkpoints.files import Stored

FP8 = "F8_E4M3"
FLOATS = ("BF16", "F16", "F32")
SCALES = (*FLOATS, "F8_E8M0")
_BYTES = {FP8: 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class Matrix:
    """Part of a weight [n, k]: some rows and columns; FP8 weights also have scales, one per 128x128 block.

    expert      where the matrix is in tensors of several experts' matrices; None: the tensors are matrices
    transposed  the tensors' last two dimensions are [k, n]
    """

    weight: Stored
    scales: Stored | None
    rows: range
    columns: range
    expert: int | None = None
    transposed: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * len(self.columns) * _BYTES[self.weight.dtype]


@dataclass(frozen=True)
class LayerSource:
    """A layer's tensors; `groups` has (gate, up, down) of the held experts, then of the shared ones."""

    router: Stored
    router_bias: Stored | None
    groups: tuple[tuple[Matrix, Matrix, Matrix], ...]
    shared_gate: Stored | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the experts' weights in the files."""
        return sum(matrix.num_bytes for group in self.groups for matrix in group)

    def part(self, experts: Sequence[int], num_experts: int) -> "LayerSource":
        """The same with the routed `experts` in this order, of all `num_experts`, and the shared ones."""
        held = tuple(self.groups[expert] for expert in experts)
        return replace(self, groups=held + self.groups[num_experts:])

    @property
    def formats(self) -> tuple[str, ...]:
        """The dtypes of the experts' weights in the files, with safetensors' names."""
        return tuple(sorted({matrix.weight.dtype for group in self.groups for matrix in group}))
