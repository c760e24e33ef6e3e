"""How a checkpoint encodes weights [n, k]: found by the names, dtypes and shapes of their tensors.

Sources: the quantizers of transformers 5.23, the exporters of ModelOpt 0.47 and compressed-tensors 0.20, the
layers of AutoGPTQ 0.7 and AutoAWQ 0.2.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.config import CheckpointError
from expertd.service.checkpoints.files import Stored
from expertd.service.util.sentences import any_of
from expertd.weight_format import WeightFormat

FP8 = "F8_E4M3"
FLOATS = ("BF16", "F16", "F32")
_EXPONENTS = ("F8_E8M0", "U8")  # 2**(byte - 127)
_IN_ONE = {"U8": 2, "I8": 2, "I32": 8}  # numbers of four bits in an element of a weight
_WEIGHTS = ("weight_packed", "blocks", "weight", "qweight")
_SCALES = ("weight_scale_inv", "weight_scale", "scale", "scales")
UNUSED = ("input_scale", "input_global_scale", "input_scale_ub", "activation_scale", "weight_shape")
"""Beside a quantized weight, of no use here: activations are quantized by their own largest values."""


_NAMES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


class Encoding(StrEnum):
    """An encoding, as `expertd layers` calls it."""

    FLOAT = "floats"
    BLOCKS = "FP8, a scale per 128x128"
    ROWS = "FP8, a scale per row"
    TENSOR = "FP8, a scale per tensor"
    MXFP8 = "MXFP8"
    NVFP4 = "NVFP4"
    MXFP4 = "MXFP4"
    INT4 = "int4"

    @property
    def has_powers(self) -> bool:
        """Whether its scales are powers of two."""
        return self in (Encoding.MXFP8, Encoding.MXFP4)

    @property
    def four_bits(self) -> WeightFormat | None:
        """The format of four bits that it is; None: none."""
        return _FOUR_BITS.get(self)


_FOUR_BITS = {
    Encoding.NVFP4: WeightFormat.NVFP4,
    Encoding.MXFP4: WeightFormat.MXFP4,
    Encoding.INT4: WeightFormat.INT4,
}


@dataclass(frozen=True)
class Form:
    """The tensors of an encoding: dtypes of values and of scales, and the [n, k] that a scale stands for.

    unit  0: all of n, or k; -1: as many as the shape of the scales says
    """

    dtypes: tuple[str, ...]
    scales: tuple[str, ...]
    unit: tuple[int, int]


FORMS = {
    Encoding.BLOCKS: Form((FP8,), (*FLOATS, "F8_E8M0"), (SCALE_BLOCK, SCALE_BLOCK)),
    Encoding.ROWS: Form((FP8,), FLOATS, (1, 0)),
    Encoding.TENSOR: Form((FP8,), FLOATS, (0, 0)),
    Encoding.MXFP8: Form((FP8,), _EXPONENTS, (1, 32)),
    Encoding.NVFP4: Form(("U8", "I8"), (FP8,), (1, 16)),
    Encoding.MXFP4: Form(("U8", "I8"), _EXPONENTS, (1, 32)),
    Encoding.INT4: Form(("I32",), FLOATS, (1, -1)),
}
"""The first one that fits is it: a matrix of one block has one scale, and needs no other name."""


@dataclass(frozen=True)
class TensorLayout:
    """How matrices [n, k] lie in tensors.

    num_experts  how many of them, one after another; None: one matrix, without a dimension for it
    transposed   each is [k, n]
    """

    num_experts: int | None = None
    transposed: bool = False

    def of_all(self, *shapes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """The shapes of tensors of all experts, by those of one."""
        yield from (shape if self.num_experts is None else (self.num_experts, *shape) for shape in shapes)

    def is_of_all(self, stored: Stored) -> bool:
        """Whether a tensor has a part for each expert."""
        return self.num_experts is not None and stored.shape[:1] == (self.num_experts,)


@dataclass(frozen=True)
class Scales:
    """The scales of a matrix; each stands for `unit` of its rows and columns, and multiplies or divides."""

    stored: Stored
    unit: tuple[int, int]
    divides: bool = False


@dataclass(frozen=True)
class Encoded:
    """The tensors of a weight of `shape` [n, k]: values, scales, and NVFP4's scales of all scales.

    zeros  GPTQ's and AWQ's zero points, which must all be those of symmetric numbers
    order  GPTQ's group of each column, which must be that of groups in order
    """

    encoding: Encoding
    weight: Stored
    shape: tuple[int, int]
    layout: TensorLayout = TensorLayout()
    scales: Scales | None = None
    whole: Scales | None = None
    zeros: Stored | None = None
    order: Stored | None = None

    @property
    def is_awq(self) -> bool:
        """Whether eight numbers of a column share an element, in AWQ's order."""
        return self.zeros is not None and not self.shares_columns

    @property
    def is_half_bytes(self) -> bool:
        """Whether a value has four bits."""
        return self.weight.dtype in _IN_ONE

    @property
    def shares_columns(self) -> bool:
        """Whether numbers of four bits that share an element are of one row."""
        (n, k), in_one = self.shape, _IN_ONE[self.weight.dtype]
        size = self.weight.shape[self.layout.num_experts is not None :]
        return size == ((k // in_one, n) if self.layout.transposed else (n, k // in_one)) or len(size) == 3

    @property
    def format(self) -> str:
        """The encoding for people."""
        return _NAMES[self.weight.dtype] if self.encoding is Encoding.FLOAT else self.encoding.value


class WeightTensors:
    """The tensors of the weight `name`, found by `has` and `find`.

    `name` is a module's, with NAME.weight and NAME.weight_scale, or with is_parameter the weight's, with
    NAME_weight_scale (ModelOpt) or NAME_scale (transformers) beside it.
    """

    def __init__(
        self,
        has: Callable[[str], bool],
        find: Callable[[str], Stored],
        name: str,
        *,
        is_parameter: bool = False,
    ) -> None:
        self.name = name
        self._has = has
        self._find = find
        self._is_parameter = is_parameter

    def names(self, suffix: str) -> tuple[str, ...]:
        """The names that the tensor `suffix` may have."""
        if not self._is_parameter:
            return (f"{self.name}.{suffix}",)
        if suffix == "weight":
            return (self.name,)
        return f"{self.name}_{suffix}", f"{self.name}_{suffix.removeprefix('weight_')}"

    def first(self, *suffixes: str) -> str | None:
        """The name of the first of these tensors that is there."""
        return next((name for suffix in suffixes for name in self.names(suffix) if self._has(name)), None)

    @property
    def exist(self) -> bool:
        """Whether there are values."""
        return self.first(*_WEIGHTS) is not None

    def weight(self) -> Stored:
        """The values. Raises CheckpointError if there are none."""
        return self._find(self.first(*_WEIGHTS) or self.names("weight")[0])

    def zeros(self) -> tuple[Stored, Stored | None]:
        """GPTQ's and AWQ's zero points, and the former's groups of columns, if it has them.

        Raises CheckpointError if there are no zero points.
        """
        order = self.first("g_idx")
        return self._find(self.names("qzeros")[0]), None if order is None else self._find(order)

    def scales(self, weight: Stored) -> Stored:
        """The scales. Raises CheckpointError if there are none."""
        name = self.first(*_SCALES)
        if name is None:
            names = (name.rpartition(".")[2] for suffix in _SCALES[:3] for name in self.names(suffix))
            expected = f"scales beside it ({any_of(list(dict.fromkeys(names)))})"
            raise CheckpointError(f"{weight.file}: {weight.name}: expected {expected}, got none")
        return self._find(name)

    def whole(self, weight: Stored) -> tuple[Stored, bool]:
        """NVFP4's scales of all scales, and whether they divide. Raises CheckpointError if there are none."""
        name = self.first("weight_scale_2", "weight_global_scale")
        if name is None:
            name = self.names("weight_global_scale" if weight.name.endswith("packed") else "weight_scale_2")[
                0
            ]
        return self._find(name), name.endswith("global_scale")


def find_encoded(
    tensors: WeightTensors, shape: tuple[int, int], layout: TensorLayout, parts: int = 1
) -> Encoded:
    """Find how the weight of `shape` [n, k] is encoded in `layout`.

    parts  equal parts of its rows, a gate and an up, that may have a scale each

    Raises CheckpointError if a tensor is missing, or has another shape or dtype than its encoding needs.
    """
    weight = tensors.weight()
    is_qweight = weight.name.endswith(".qweight")
    if is_qweight:
        layout = replace(layout, transposed=True)
    fits = weight.shape in stored_shapes(weight.dtype, shape, layout)
    if not fits and weight.shape not in stored_shapes(FP8, shape, layout):
        raise _wrong(weight, "shape", stored_shapes(weight.dtype, shape, layout), weight.shape)
    if not fits or weight.dtype not in (FP8, *FLOATS, *_IN_ONE):
        raise _wrong(weight, "dtype", (FP8, *FLOATS), weight.dtype)
    if weight.dtype in FLOATS:
        return Encoded(Encoding.FLOAT, weight, shape, layout)
    encoding, scales = _scales(weight, tensors.scales(weight), shape, layout, parts)
    whole = None
    if encoding is Encoding.NVFP4:
        stored, divides = tensors.whole(weight)
        check(stored, stored.shape, ("F32",))
        units = _units(FORMS[Encoding.TENSOR], stored, shape, layout, parts)
        whole = Scales(stored, _fitting(units, stored, shape, layout), divides)
    zeros, order = tensors.zeros() if is_qweight else (None, None)
    if zeros is not None:
        check(zeros, (shape[1] // scales.unit[1], shape[0] // _IN_ONE["I32"]), ("I32",))
    if order is not None:
        check(order, (shape[1],), ("I32",))
    return Encoded(encoding, weight, shape, layout, scales, whole, zeros, order)


def stored_shapes(dtype: str, shape: tuple[int, int], layout: TensorLayout) -> list[tuple[int, ...]]:
    """The shapes that values of a weight of `shape` [n, k] may have: those of four bits share elements."""
    (n, k), in_one = shape, _IN_ONE.get(dtype, 1)
    if layout.transposed:
        shapes: list[tuple[int, ...]] = [(k // in_one, n), (k, n // in_one)]
    else:
        shapes = [(n, k // in_one)]
        if in_one == 2 and layout.num_experts is not None:
            shapes.append((n, -(-k // 32), 16))  # gpt-oss: the bytes of each scale
    return list(dict.fromkeys(layout.of_all(*shapes)))


def scale_shapes(
    unit: tuple[int, int], shape: tuple[int, int], layout: TensorLayout
) -> list[tuple[int, ...]]:
    """The shapes that scales may have, if each stands for `unit` of a weight of `shape` [n, k]."""
    rows, columns = (-(-size // of) for size, of in zip(shape, unit, strict=True))
    if layout.transposed:
        shapes: list[tuple[int, ...]] = [(columns, rows)]
    else:
        shapes = [(rows, columns), (rows, 1, columns, 1)]  # the latter: ModelOpt's FP8_PB_WO
    if columns == 1:
        shapes.append((rows,))
        if layout.num_experts is not None:
            shapes += [(rows, 1), (1, rows)]  # fbgemm's are not transposed with every weight
    if rows == columns == 1:
        shapes.append(())
    shapes = list(layout.of_all(*shapes))
    if rows == columns == 1 and layout.num_experts is not None:
        shapes += [(), (1,)]  # one for all experts
    return list(dict.fromkeys(shapes))


def _scales(
    weight: Stored, stored: Stored, shape: tuple[int, int], layout: TensorLayout, parts: int
) -> tuple[Encoding, Scales]:
    forms = {encoding: form for encoding, form in FORMS.items() if weight.dtype in form.dtypes}
    check(stored, stored.shape, tuple(dict.fromkeys(chain(*(form.scales for form in forms.values())))))
    units: dict[tuple[int, int], Encoding] = {}
    for encoding, form in forms.items():
        is_inverse = stored.name.endswith("_inv")  # DeepSeek's, never of rows
        if stored.dtype in form.scales and not (encoding is Encoding.ROWS and is_inverse):
            for unit in _units(form, stored, shape, layout, parts):
                units.setdefault(unit, encoding)
    groups = f"scales of {shape[0]} rows and a divisor of {shape[1]} columns"
    unit = _fitting(units, stored, shape, layout, groups if Encoding.INT4 in forms else None)
    return units[unit], Scales(stored, unit)


def _units(
    form: Form, stored: Stored, shape: tuple[int, int], layout: TensorLayout, parts: int
) -> Iterator[tuple[int, int]]:
    """The rows and columns that a scale of a weight of `shape` [n, k] may stand for."""
    (n, k), (rows, columns) = shape, form.unit
    if columns < 0:
        yield from ((rows, k // groups) for groups in stored.shape if groups and k % groups == 0)
        return
    yield rows or n, columns or k
    if not rows and parts > 1:
        yield n // parts, k
    if layout.transposed and rows == 1 and columns:
        yield columns, rows  # ModelOpt: groups in the last dimension, whatever it is


def _fitting(
    units: Iterable[tuple[int, int]],
    stored: Stored,
    shape: tuple[int, int],
    layout: TensorLayout,
    expected: str | None = None,
) -> tuple[int, int]:
    """The unit that scales of this shape have. Raises CheckpointError if they have another shape."""
    shapes = {unit: scale_shapes(unit, shape, layout) for unit in units}
    for unit, fitting in shapes.items():
        if stored.shape in fitting:
            return unit
    possible = [fitting[0] for fitting in shapes.values()] if expected is None else [expected]
    raise _wrong(stored, "shape", possible, stored.shape)


def check(tensor: Stored, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """Raise CheckpointError unless the tensor has this shape, and one of these dtypes."""
    if tensor.shape != shape:
        raise _wrong(tensor, "shape", [shape], tensor.shape)
    if tensor.dtype not in dtypes:
        raise _wrong(tensor, "dtype", dtypes, tensor.dtype)


def _wrong(tensor: Stored, what: str, expected: Iterable[object], got: object) -> CheckpointError:
    text = " or ".join(map(str, expected))
    return CheckpointError(f"{tensor.file}: {tensor.name} {what}: expected {text}, got {got}")
