"""Finds the tensors of one MoE layer of a checkpoint, and checks their names, shapes and dtypes."""

from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.config import CheckpointError
from expertd.service.checkpoints.encodings import (
    FLOATS,
    FP8,
    SCALES,
    UNUSED,
    Encoded,
    Encoding,
    check,
    find_encoded,
)
from expertd.service.checkpoints.files import Stored, TensorFiles
from expertd.service.checkpoints.layer import Biases, LayerSource, Matrix
from expertd.service.checkpoints.model import PREFIXES, MoEModel
from expertd.service.checkpoints.unknown import check_names

Group = tuple[Matrix, Matrix, Matrix]

_BLOCKS = "_blocks"  # what follows the names of stacked matrices in MXFP4


def present_layers(files: TensorFiles, model: MoEModel) -> list[int]:
    """The MoE layers that the files must contain: all except next_token_layers that they leave out.

    Raises CheckpointError if the files cannot be read.
    """
    return [
        layer
        for layer in model.layers
        if layer not in model.next_token_layers or _starts(files, model, layer)
    ]


def find_layer(
    files: TensorFiles,
    model: MoEModel,
    layer: int,
    experts: range,
    num_shared_experts: int,
    requantize: bool,
) -> LayerSource:
    """Find the tensors of layer `layer` with the routed `experts` and the first `num_shared_experts`.

    requantize: whether encodings are allowed that must be rounded once more. Reads only headers. Raises
    CheckpointError if a tensor is missing, has the wrong shape or dtype, or is in the layer's block and of no
    use that `model` knows.
    """
    starts = _starts(files, model, layer)
    if len(starts) > 1:
        raise CheckpointError(f"{files.directory}: layer {layer}: expected one, got {' and '.join(starts)}")
    finder = _Finder(files, model, starts[0] if starts else f"{PREFIXES[0]}{layer}.", requantize)
    return finder.find(experts, num_shared_experts)


def _starts(files: TensorFiles, model: MoEModel, layer: int) -> list[str]:
    """What the names of the layer's tensors begin with: one in a good checkpoint, none if it is absent."""
    starts = (f"{prefix}{layer}." for prefix in PREFIXES)
    return [start for start in starts if files.has(f"{start}{model.names.router}")]


class _Finder:
    def __init__(self, files: TensorFiles, model: MoEModel, start: str, requantize: bool) -> None:
        self._files = files
        self._requantize = requantize
        self._model = model
        self._start = start
        self._used: set[str] = set()

    def find(self, experts: range, num_shared_experts: int) -> LayerSource:
        model, names = self._model, self._model.names
        stacked = any(self._has(f"{names.stacked[0]}{suffix}") for suffix in ("", _BLOCKS))
        groups = self._stacked(experts) if stacked else self._separate(experts)
        groups += self._shared(num_shared_experts)
        bias = None
        if names.router_bias is not None:
            bias = self._vector(names.router_bias, model.num_experts)
        router = self._plain(names.router, (model.num_experts, model.hidden_size))
        gate = None
        if names.shared_gate is not None and num_shared_experts > 0:
            gate = self._vector(names.shared_gate, model.hidden_size)
        biases = self._biases(experts)
        check_names(self._files, model, self._start, self._used)
        return LayerSource(router, bias, tuple(groups), gate, biases)

    def _separate(self, experts: range) -> list[Group]:
        """Experts with a tensor for each projection."""
        names, size = self._model.names, self._model.intermediate_size
        return [
            self._group(f"{names.experts}.{expert}", names.projections, range(size), size)
            for expert in experts
        ]

    def _shared(self, count: int) -> list[Group]:
        """The first `count` parts of the shared expert, each as wide as a routed one."""
        names, size = self._model.names, self._model.intermediate_size
        projections, whole = names.shared_projections or names.projections, self._model.num_shared_experts
        return [
            self._group(names.shared, projections, range(part * size, (part + 1) * size), whole * size)
            for part in range(count)
        ]

    def _group(self, name: str, projections: tuple[str, str, str], part: range, size: int) -> Group:
        """`part` of the gate, up and down projections of an expert with intermediate size `size`."""
        hidden = range(self._model.hidden_size)
        gate, up, down = (f"{name}.{projection}" for projection in projections)
        return (
            self._matrix(gate, (size, len(hidden)), part, hidden),
            self._matrix(up, (size, len(hidden)), part, hidden),
            self._matrix(down, (len(hidden), size), hidden, part),
        )

    def _matrix(self, name: str, shape: tuple[int, int], rows: range, columns: range) -> Matrix:
        encoded = find_encoded(self._has, self._find, name, shape)
        if encoded.encoding not in (Encoding.FLOAT, Encoding.BLOCKS):
            self._used.update(f"{self._start}{name}.{unused}" for unused in UNUSED)
        self._check_allowed(encoded)
        return Matrix(encoded, rows, columns)

    def _check_allowed(self, encoded: Encoded) -> None:
        if not (encoded.encoding.is_native or self._requantize):
            raise CheckpointError(
                f"{encoded.weight.file}: {encoded.weight.name}: expected floats, or FP8 with a scale per "
                f"128x128 block, got {encoded.encoding}; with requantize: allow, it is rounded to that FP8"
            )

    def _stacked(self, experts: range) -> list[Group]:
        """Experts of which each tensor has all, one after another: gate and up in one, or in two."""
        model, hidden, size = self._model, self._model.hidden_size, self._model.intermediate_size
        fused = len(model.names.stacked) == 2
        sizes = [*([(2 * size, hidden)] if fused else [(size, hidden)] * 2), (hidden, size)]
        transposed = False
        if self._has(f"{model.names.stacked[0]}{_BLOCKS}"):
            pairs = [self._in_blocks(*named) for named in zip(model.names.stacked, sizes, strict=True)]
        else:
            tensors = [self._find(name) for name in model.names.stacked]
            transposed = [tensor.shape for tensor in tensors] == [(model.num_experts, k, n) for n, k in sizes]
            pairs = []
            for tensor, (n, k) in zip(tensors, sizes, strict=True):
                shape = (model.num_experts, k, n) if transposed else (model.num_experts, n, k)
                pairs.append(self._encoded(tensor, shape))
        gate, up, down = [pairs[0], *pairs] if fused else pairs
        inner, outer = range(size), range(hidden)
        gates, ups = inner, range(size, 2 * size) if fused else inner
        if model.names.interleaved:
            gates, ups = range(0, 2 * size, 2), range(1, 2 * size, 2)
        parts = (gate, gates, outer), (up, ups, outer), (down, outer, inner)

        def group(expert: int) -> Group:
            gate, up, down = (
                Matrix(encoded, rows, columns, expert, transposed) for encoded, rows, columns in parts
            )
            return gate, up, down

        return [group(expert) for expert in experts]

    def _encoded(self, weight: Stored, shape: tuple[int, int, int]) -> Encoded:
        """Matrices of all experts: floats, or FP8 with a scale for each block."""
        check(weight, shape, (FP8, *FLOATS))
        if weight.dtype != FP8:
            return Encoded(Encoding.FLOAT, weight)
        if self._model.names.interleaved:
            raise CheckpointError(f"{weight.file}: {weight.name}: expected floats or MXFP4, got FP8")
        name = weight.name.removeprefix(self._start)
        scale = next((s for s in ("_scale_inv", "_scale") if self._has(f"{name}{s}")), "_scale_inv")
        scales = self._find(f"{name}{scale}")
        n, k = (-(-size // SCALE_BLOCK) for size in shape[1:])
        check(scales, (shape[0], n, k), SCALES)
        return Encoded(Encoding.BLOCKS, weight, scales)

    def _in_blocks(self, name: str, size: tuple[int, int]) -> Encoded:
        """Matrices [n, k] of all experts in MXFP4: 32 numbers in 16 bytes, with a scale."""
        weight, scales = self._find(f"{name}{_BLOCKS}"), self._find(f"{name}_scales")
        n, k = size
        shape = self._model.num_experts, n, -(-k // 32)
        check(weight, (*shape, 16), ("U8",))
        check(scales, shape, ("U8",))
        encoded = Encoded(Encoding.MXFP4, weight, scales)
        self._check_allowed(encoded)
        return encoded

    def _biases(self, experts: range) -> Biases | None:
        model, names = self._model, self._model.names
        if names.biases is None:
            return None
        gate_up, down = names.biases
        return Biases(
            self._plain(gate_up, (model.num_experts, 2 * model.intermediate_size)),
            self._plain(down, (model.num_experts, model.hidden_size)),
            tuple(experts),
            names.interleaved,
        )

    def _vector(self, name: str, size: int) -> Stored:
        """A tensor [size], or [1, size]."""
        tensor = self._find(name)
        check(tensor, (1, size) if len(tensor.shape) == 2 else (size,), FLOATS)
        return tensor

    def _plain(self, name: str, shape: tuple[int, ...]) -> Stored:
        tensor = self._find(name)
        check(tensor, shape, FLOATS)
        return tensor

    def _has(self, name: str) -> bool:
        return self._files.has(f"{self._start}{name}")

    def _find(self, name: str) -> Stored:
        self._used.add(f"{self._start}{name}")
        return self._files.find(f"{self._start}{name}")
