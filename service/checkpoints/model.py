"""The MoE layers that a config.json describes, and where the weights of one are in the files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from expertd.activation import ExpertRule
from expertd.limits import COLUMN_STEP, SCALE_BLOCK
from expertd.service.checkpoints.encodings import Encoded, Encoding
from expertd.service.checkpoints.files import Stored
from expertd.service.checkpoints.quantization import Quantization
from expertd.weight_format import FP8_BLOCKS, WeightFormat, WeightLayout

PREFIXES = (
    "model.layers.",
    "model.language_model.layers.",
    "language_model.model.layers.",
    "model.language_model.model.layers.",
    "thinker.model.layers.",
    "layers.",
)
"""What may stand before a layer's number in the names of its tensors; it differs between checkpoints."""


@dataclass(frozen=True)
class Names:
    """A family's names for the tensors of an MoE layer, after the layer's number and a dot.

    router        the router's weight
    experts       the routed experts: their projections are under experts.E
    projections   of an expert: gate, up, down
    router_bias   the bias added to the scores for the choice of experts; None: no bias
    shared        the shared expert, if a model has one
    shared_projections  of the shared expert, gate, up, down; None: named like those of the routed ones
    shared_gate   the weight of the shared expert's gate; None: it has none
    stacked       all experts' projections in one tensor each: (gate and up, down), or gate, up, down
    interleaved   in the first of these, rows of gates and of ups alternate
    biases        all experts' biases: (gate and up, down), in the same order; None: there are none
    """

    router: str
    experts: str
    projections: tuple[str, str, str]
    router_bias: str | None
    shared: str
    shared_projections: tuple[str, str, str] | None
    shared_gate: str | None
    stacked: tuple[str, ...]
    interleaved: bool = False
    biases: tuple[str, str] | None = None


@dataclass(frozen=True)
class MoEModel:
    """The MoE layers of one model: their numbers and sizes, the routing rule, and the tensors' names.

    routing has the keys of `RoutingSettings`. num_shared_experts counts experts of intermediate_size; the
    checkpoint stores them as one wide expert. next_token_layers are the ones in `layers` for multi-token
    prediction, which many checkpoints leave out. family is the model_type of config.json. rules has those of
    the layers whose experts do not follow the common one. refused says of layers that are MoE layers, but
    not in `layers`, why they cannot be served. quantization is what is said of their weights.
    """

    layers: tuple[int, ...]
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    routing: dict[str, Any]
    names: Names
    num_shared_experts: int = 0
    next_token_layers: range = range(0)
    family: str = ""
    rules: Mapping[int, ExpertRule] = field(default_factory=lambda: MappingProxyType({}))
    refused: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    quantization: Quantization = field(default_factory=Quantization, compare=False)


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
    def four_bits(self) -> WeightLayout | None:
        """The layout of four bits that its tensors have as they are; None: they have none."""
        encoded, scales = self.encoded, self.encoded.scales
        found = encoded.encoding.four_bits
        if found is None or scales is None or not (encoded.shares_columns or encoded.is_awq):
            return None
        rows, size = scales.unit
        step = max(size, COLUMN_STEP)
        if (
            rows != 1
            or size not in found.group_sizes
            or self.columns.start % step
            or len(self.columns) % step
        ):
            return None
        dtype = "U8" if found is WeightFormat.MXFP4 else scales.stored.dtype
        return WeightLayout(found, size, dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of its values in the file."""
        numbers = len(self.rows) * len(self.columns)
        return numbers * _BYTES.get(self.encoded.weight.dtype, 1) // (2 if self.encoded.is_half_bytes else 1)


@dataclass(frozen=True)
class Biases:
    """The tensors [E, ...] of all experts' biases, and the held experts, in order.

    interleaved  those of gates and of ups alternate; else all of an expert's gates come first
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
    weight_layout, shared_layout  those in which the routed and the shared experts are served
    num_shared  the shared ones in `groups`
    """

    start: str
    router: Stored
    router_bias: Stored | None
    groups: tuple[tuple[Matrix, Matrix, Matrix], ...]
    shared_gate: Stored | None = None
    biases: Biases | None = None
    weight_layout: WeightLayout = FP8_BLOCKS
    shared_layout: WeightLayout = FP8_BLOCKS
    num_shared: int = 0

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
