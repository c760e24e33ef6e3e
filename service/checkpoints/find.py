"""Finds the tensors of one MoE layer, checks their names, shapes and dtypes, and refuses unknown ones."""

import re
from collections.abc import Callable, Set
from itertools import chain

from expertd.backends import taking
from expertd.service.checkpoints.config import CheckpointError
from expertd.service.checkpoints.encodings import (
    FLOATS,
    UNUSED,
    Encoded,
    Encoding,
    TensorLayout,
    WeightTensors,
    check,
    find_encoded,
    stored_shapes,
)
from expertd.service.checkpoints.files import Stored, TensorFiles
from expertd.service.checkpoints.model import PREFIXES, Biases, LayerSource, Matrix, MoEModel
from expertd.weight_format import FP8_BLOCKS, WeightFormat, WeightLayout

_MAX_NAMED = 3
# The parts of a layer that may belong to its MoE block; not norms, nor what mixes residual streams (hc).
_COMPUTES = re.compile(r"(?!\w*(?:norm|hc))\w*(?:mlp|moe|expert|router|feed_forward|ffn)")
# The tensors of a weight, in every encoding; of an expert that is held here, all are used or refused.
_SUFFIXES = (
    "weight", "weight_scale_inv", "weight_scale", "scale", "weight_scale_2", "weight_packed",
    "weight_global_scale", "qweight", "qzeros", "scales", "g_idx", *UNUSED,
)  # fmt: skip


def check_names(files: TensorFiles, model: MoEModel, start: str, used: Set[str]) -> None:
    """Raise CheckpointError if the layer whose names begin with `start` has unknown tensors in its MoE block.

    Or beside it, in a part that looks like one.

    used  the names that have been found. The other experts', which are held elsewhere, are known, too
    """
    names = model.names
    unknown = sorted(
        name
        for name in files.under(start) - used
        if _COMPUTES.match(name.removeprefix(start))
        and not _is_elsewhere(model, start, name.removeprefix(start), used)
    )
    if not unknown:
        return
    named, more = ", ".join(unknown[:_MAX_NAMED]), len(unknown) - _MAX_NAMED
    got = f"{named} and {more} more" if more > 0 else named
    shared = " and a shared one" if model.num_shared_experts else ""
    raise CheckpointError(
        f"{files.directory}: {start}{names.experts.rpartition('.')[0]}: expected only a router and "
        f"{model.num_experts} experts{shared} as in {model.family}, got {got}"
    )


def _is_elsewhere(model: MoEModel, start: str, name: str, used: Set[str]) -> bool:
    """Whether `name` is of one of the model's experts, or the shared one, that is not held here."""
    names = model.names
    if name == names.shared_gate and model.num_shared_experts:
        return True  # found if the shared expert is held here
    found = re.match(rf"{re.escape(names.experts)}\.(0|[1-9]\d*)\.", name)
    if found and int(found[1]) < model.num_experts:
        expert, projections = found[0], names.projections
    elif model.num_shared_experts and name.startswith(f"{names.shared}."):
        expert, projections = f"{names.shared}.", names.shared_projections or names.projections
    else:
        return False
    if any(
        f"{start}{expert}{projections[0]}.{suffix}" in used
        for suffix in ("weight", "weight_packed", "qweight")
    ):
        return False  # it is held here
    return name in {f"{expert}{projection}.{suffix}" for projection in projections for suffix in _SUFFIXES}


Group = tuple[Matrix, Matrix, Matrix]
_SEPARATE = TensorLayout()


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
    takes: Callable[[], Set[WeightFormat]],
) -> LayerSource:
    """Find the tensors of layer `layer` with the routed `experts` and the first `num_shared_experts`.

    requantize: whether encodings are allowed that must be rounded once more. takes: the formats that may be
    served as they are, asked only if there are four bits. Reads only headers. Raises CheckpointError if a
    tensor is missing, has the wrong shape or dtype, or is in the layer's block and of no use that `model`
    knows.
    """
    starts = _starts(files, model, layer)
    if len(starts) > 1:
        raise CheckpointError(f"{files.directory}: layer {layer}: expected one, got {' and '.join(starts)}")
    finder = _Finder(files, model, starts[0] if starts else f"{PREFIXES[0]}{layer}.", requantize, takes)
    return finder.find(experts, num_shared_experts)


def _starts(files: TensorFiles, model: MoEModel, layer: int) -> list[str]:
    """What the names of the layer's tensors begin with: one in a good checkpoint, none if it is absent."""
    starts = (f"{prefix}{layer}." for prefix in PREFIXES)
    return [start for start in starts if files.has(f"{start}{model.names.router}")]


class _Finder:
    def __init__(
        self,
        files: TensorFiles,
        model: MoEModel,
        start: str,
        requantize: bool,
        takes: Callable[[], Set[WeightFormat]],
    ) -> None:
        self._files = files
        self._requantize, self._takes = requantize, takes
        self._model = model
        self._start = start
        self._used: set[str] = set()

    def find(self, experts: range, num_shared_experts: int) -> LayerSource:
        model, names = self._model, self._model.names
        stacked = [self._weight(name) for name in names.stacked]
        routed = self._stacked(stacked, experts) if stacked[0].exist else self._separate(experts)
        shared = self._shared(num_shared_experts)
        bias = None
        if names.router_bias is not None:
            bias = self._vector(names.router_bias, model.num_experts)
        router = self._plain(names.router, (model.num_experts, model.hidden_size))
        gate = None
        if names.shared_gate is not None and num_shared_experts > 0:
            gate = self._vector(names.shared_gate, model.hidden_size)
        biases = self._biases(experts)
        check_names(self._files, model, self._start, self._used)
        layout = self._layout_of(routed, FP8_BLOCKS)
        shared_layout = self._layout_of(shared, layout)
        groups = tuple(routed + shared)
        return LayerSource(
            self._start, router, bias, groups, gate, biases, layout, shared_layout, len(shared)
        )

    def _separate(self, experts: range) -> list[Group]:
        """Experts with a tensor for each projection."""
        names, size = self._model.names, self._model.intermediate_size
        first = f"{names.experts}.{experts[0]}.{names.projections[0]}"
        if not self._weight(first).exist:
            self._explain(first, None)
            either = f"{self._start}{names.stacked[0]} or {self._start}{first}.weight"
            expected = f"expected tensor {either}, got none with one of these names"
            raise CheckpointError(f"{self._files.directory}: {expected}")
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
        return Matrix(self._encoded(self._weight(name), shape, _SEPARATE), rows, columns)

    def _weight(self, name: str) -> WeightTensors:
        """The tensors of a weight: of a module with that name, or of a stack that is a parameter."""
        is_parameter = name in self._model.names.stacked and not name.endswith(".weight")
        return WeightTensors(self._has, self._find, name.removesuffix(".weight"), is_parameter=is_parameter)

    def _encoded(
        self, tensors: WeightTensors, shape: tuple[int, int], layout: TensorLayout, parts: int = 1
    ) -> Encoded:
        """How a weight is encoded, which config.json must not contradict."""
        try:
            encoded = find_encoded(tensors, shape, layout, parts)
        except CheckpointError:
            self._explain(tensors.name, None)
            raise
        self._explain(tensors.name, encoded)
        if encoded.encoding is not Encoding.FLOAT:
            self._used.update(f"{self._start}{name}" for unused in UNUSED for name in tensors.names(unused))
        return encoded

    def _explain(self, name: str, encoded: Encoded | None) -> None:
        """Raise CheckpointError if what config.json says of the weight is why it cannot be served."""
        self._model.quantization.check(f"{self._start}{name}", encoded)

    def _layout_of(self, groups: list[Group], default: WeightLayout) -> WeightLayout:
        """How these experts are served: in four bits, as they are, if they may be; else in FP8.

        default  without any experts

        Raises CheckpointError if they, which could be served, must not be rounded.
        """
        found = {matrix.four_bits for matrix in chain.from_iterable(groups)}
        layout = next(iter(found), default) if len(found) < 2 else None
        if not groups or (layout is not None and layout.format in self._takes()):
            return layout or default
        for matrix in chain.from_iterable(groups):
            self._check_allowed(matrix, layout)
        return FP8_BLOCKS

    def _check_allowed(self, matrix: Matrix, layout: WeightLayout | None) -> None:
        """Raise CheckpointError if the matrix must not be rounded; layout: that in which it need not be."""
        if matrix.is_native or self._requantize:
            return
        weight, rows = matrix.encoded.weight, " of interleaved gates and ups" if matrix.rows.step > 1 else ""
        as_it_is = "" if layout is None else f"; backend {taking(layout.format)} takes it as it is"
        raise CheckpointError(
            f"{weight.file}: {weight.name}: expected floats, or FP8 with a scale per 128x128 block or per "
            f"tensor, got {matrix.encoded.encoding}{rows}; with requantize: allow, it is rounded to that FP8"
            f"{as_it_is}"
        )

    def _stacked(self, tensors: list[WeightTensors], experts: range) -> list[Group]:
        """Experts of which each tensor has all, one after another: gate and up in one, or in two."""
        names, hidden, size = self._model.names, self._model.hidden_size, self._model.intermediate_size
        fused = len(tensors) == 2
        sizes = [*([(2 * size, hidden)] if fused else [(size, hidden)] * 2), (hidden, size)]
        layout, parts = self._layout(tensors, sizes), [1 if names.interleaved else 2, 1] if fused else [1] * 3
        found = [
            self._encoded(one, shape, layout, count)
            for one, shape, count in zip(tensors, sizes, parts, strict=True)
        ]
        gate, up, down = [found[0], *found] if fused else found
        inner, outer = range(size), range(hidden)
        gates, ups = inner, range(size, 2 * size) if fused else inner
        if names.interleaved:
            gates, ups = range(0, 2 * size, 2), range(1, 2 * size, 2)
        matrices = (gate, gates, outer), (up, ups, outer), (down, outer, inner)

        def group(expert: int) -> Group:
            gate, up, down = (Matrix(*matrix, expert) for matrix in matrices)
            return gate, up, down

        return [group(expert) for expert in experts]

    def _layout(self, tensors: list[WeightTensors], sizes: list[tuple[int, int]]) -> TensorLayout:
        """Whether matrices [n, k] of these sizes are transposed, by most of the shapes: some fit both."""
        weights = [one.weight() for one in tensors]

        def count(layout: TensorLayout) -> int:
            shapes = (
                stored_shapes(one.dtype, size, layout) for one, size in zip(weights, sizes, strict=True)
            )
            return sum(one.shape in fitting for one, fitting in zip(weights, shapes, strict=True))

        return max(
            (TensorLayout(self._model.num_experts, transposed) for transposed in (False, True)), key=count
        )

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
