"""Where the weights of one MoE layer are in the files of a checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.encodings import Encoded, Encoding
from expertd.service.checkpoints.files import Stored

_BYTES = {"F8_E4M3": 1, "BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class Matrix:
    """Part of a weight [n, k]: some rows, which may be every other one, and columns.

    expert  where the matrix is in tensors of several experts' matrices; None: the tensors are matrices
    """

    encoded: Encoded
    rows: range
    columns: range
    expert: int | None = None

    @property
    def is_native(self) -> bool:
        """Whether it is served without rounding FP8 or fewer bits once more."""
        if self.encoded.encoding is not Encoding.BLOCKS:
            return self.encoded.encoding in (Encoding.FLOAT, Encoding.TENSOR)
        return self.rows.step == 1 and not (self.rows.start % SCALE_BLOCK or self.columns.start % SCALE_BLOCK)

    @property
    def num_bytes(self) -> int:
        """Bytes of its values in the file."""
        numbers = len(self.rows) * len(self.columns)
        return numbers * _BYTES.get(self.encoded.weight.dtype, 1) // (2 if self.encoded.is_half_bytes else 1)


@dataclass(frozen=True)
class Biases:
    """The tensors [E, ...] of all experts' biases, and the held experts, in order.

    interleaved  those of gates and of ups come in turns; else all of an expert's gates come first
    """

    gate_up: Stored
    down: Stored
    experts: tuple[int, ...]
    interleaved: bool


@dataclass(frozen=True)
class LayerSource:
    """A layer's tensors; `groups` has (gate, up, down) of the held experts, then of the shared ones.

    start   what the names of all of the layer's tensors begin with
    biases  of families whose experts have some; they have no shared ones
    """

    start: str
    router: Stored
    router_bias: Stored | None
    groups: tuple[tuple[Matrix, Matrix, Matrix], ...]
    shared_gate: Stored | None = None
    biases: Biases | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the experts' weights in the files."""
        return sum(matrix.num_bytes for group in self.groups for matrix in group)

    def part(self, experts: Sequence[int], num_experts: int) -> "LayerSource":
        """The same with the routed `experts` in this order, of all `num_experts`, and the shared ones."""
        held = tuple(self.groups[expert] for expert in experts)
        biases = self.biases
        if biases is not None:
            biases = replace(biases, experts=tuple(biases.experts[expert] for expert in experts))
        return replace(self, groups=held + self.groups[num_experts:], biases=biases)

    @property
    def formats(self) -> tuple[str, ...]:
        """How the experts' weights are encoded in the files."""
        return tuple(sorted({matrix.encoded.format for group in self.groups for matrix in group}))
