"""Finds the tensors of one MoE layer of a checkpoint, and checks their shapes and dtypes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.config import CheckpointError
from expertd.service.checkpoints.files import Stored, TensorFiles
from expertd.service.checkpoints.model import MoEModel

FP8 = "F8_E4M3"
_FLOATS = ("BF16", "F16", "F32")
_SCALES = (*_FLOATS, "F8_E8M0")
_BYTES = {FP8: 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4}


@dataclass(frozen=True)
class Matrix:
    """Part of a weight [n, k]: some rows and columns; FP8 weights also have scales, one per 128x128 block."""

    weight: Stored
    scales: Stored | None
    rows: range
    columns: range

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * len(self.columns) * _BYTES[self.weight.dtype]


@dataclass(frozen=True)
class LayerSource:
    """A layer's tensors; `groups` has (gate, up, down) of the held experts, then of the shared ones."""

    router: Stored
    router_bias: Stored | None
    groups: tuple[tuple[Matrix, Matrix, Matrix], ...]

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


def present_layers(files: TensorFiles, model: MoEModel) -> list[int]:
    """The MoE layers that the files must contain: all except next_token_layers that they leave out.

    Raises CheckpointError if the files cannot be read.
    """
    router = f"{model.names.block}.gate.weight"
    return [
        layer
        for layer in model.layers
        if layer not in model.next_token_layers or files.has(f"model.layers.{layer}.{router}")
    ]


def find_layer(
    files: TensorFiles, model: MoEModel, layer: int, experts: range, num_shared_experts: int
) -> LayerSource:
    """Find the tensors of layer `layer` with the routed `experts` and the first `num_shared_experts`.

    Reads only headers. Raises CheckpointError if a tensor is missing or has the wrong shape or dtype.
    """
    return _Finder(files, model, layer).find(experts, num_shared_experts)


class _Finder:
    def __init__(self, files: TensorFiles, model: MoEModel, layer: int) -> None:
        self._files = files
        self._model = model
        self._prefix = f"model.layers.{layer}.{model.names.block}"

    def find(self, experts: range, num_shared_experts: int) -> LayerSource:
        model, names = self._model, self._model.names
        hidden, intermediate = model.hidden_size, model.intermediate_size
        groups = [self._expert(f"experts.{expert}", range(intermediate), intermediate) for expert in experts]
        for shared in range(num_shared_experts):
            part = range(shared * intermediate, (shared + 1) * intermediate)
            groups.append(self._expert(names.shared, part, model.num_shared_experts * intermediate))
        bias = None
        if names.router_bias is not None:
            bias = self._plain(names.router_bias, (model.num_experts,))
        router = self._plain("gate.weight", (model.num_experts, hidden))
        return LayerSource(router, bias, tuple(groups))

    def _expert(self, name: str, part: range, size: int) -> tuple[Matrix, Matrix, Matrix]:
        """`part` of the gate, up and down projections of an expert with intermediate size `size`."""
        names, hidden = self._model.names, range(self._model.hidden_size)
        gate = self._matrix(f"{name}.{names.gate}", (size, len(hidden)), part, hidden)
        up = self._matrix(f"{name}.{names.up}", (size, len(hidden)), part, hidden)
        down = self._matrix(f"{name}.{names.down}", (len(hidden), size), hidden, part)
        return gate, up, down

    def _matrix(self, name: str, shape: tuple[int, int], rows: range, columns: range) -> Matrix:
        weight = self._files.find(f"{self._prefix}.{name}.weight")
        _check(weight, shape, (FP8, *_FLOATS))
        if weight.dtype != FP8:
            return Matrix(weight, None, rows, columns)
        scales = self._files.find(f"{self._prefix}.{name}.weight_scale_inv")
        _check(scales, (-(-shape[0] // SCALE_BLOCK), -(-shape[1] // SCALE_BLOCK)), _SCALES)
        return Matrix(weight, scales, rows, columns)

    def _plain(self, name: str, shape: tuple[int, ...]) -> Stored:
        tensor = self._files.find(f"{self._prefix}.{name}")
        _check(tensor, shape, _FLOATS)
        return tensor


def _check(tensor: Stored, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    for what, got, good, expected in (
        ("shape", tensor.shape, tensor.shape == shape, shape),
        ("dtype", tensor.dtype, tensor.dtype in dtypes, " or ".join(dtypes)),
    ):
        if not good:
            raise CheckpointError(f"{tensor.file}: {tensor.name} {what}: expected {expected}, got {got}")
