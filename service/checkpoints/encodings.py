"""How a checkpoint encodes a weight [n, k]: found by the names, dtypes and shapes of its tensors.

Sources: the quantizers of transformers 5.23, and checkpoints of NVIDIA's ModelOpt and of compressed-tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.config import CheckpointError
from expertd.service.checkpoints.files import Stored

FP8 = "F8_E4M3"
FLOATS = ("BF16", "F16", "F32")
SCALES = (*FLOATS, "F8_E8M0")
_SCALE_NAMES = ("weight_scale_inv", "weight_scale", "scale")
_EXPONENTS = ("F8_E8M0", "U8")  # 2**(byte - 127)
UNUSED = ("input_scale", "input_global_scale", "weight_shape")
"""Beside a weight, of no use here: activations are quantized by their own largest values."""


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
    def is_native(self) -> bool:
        """Whether it is served without rounding FP8 or fewer bits once more."""
        return self in (Encoding.FLOAT, Encoding.BLOCKS, Encoding.TENSOR)

    @property
    def has_powers(self) -> bool:
        """Whether its scales are powers of two."""
        return self in (Encoding.MXFP8, Encoding.MXFP4)


@dataclass(frozen=True)
class Encoded:
    """A weight's tensors: values, scales, and NVFP4's scale of all scales, which `divides` or multiplies."""

    encoding: Encoding
    weight: Stored
    scales: Stored | None = None
    whole: Stored | None = None
    divides: bool = False

    @property
    def is_half_bytes(self) -> bool:
        """Whether a value has four bits."""
        return self.encoding in (Encoding.NVFP4, Encoding.MXFP4, Encoding.INT4)

    @property
    def format(self) -> str:
        """The encoding for people."""
        return _NAMES[self.weight.dtype] if self.encoding is Encoding.FLOAT else self.encoding.value


def find_encoded(
    has: Callable[[str], bool], find: Callable[[str], Stored], name: str, shape: tuple[int, int]
) -> Encoded:
    """Find the tensors of the weight `name` (without .weight) of `shape`, by `has` and `find`.

    Raises CheckpointError if one is missing, or has another shape or dtype than its encoding needs.
    """
    if has(f"{name}.weight_packed"):
        return _packed(find, name, shape)
    weight = find(f"{name}.weight")
    if weight.dtype in FLOATS:
        check(weight, shape, FLOATS)
        return Encoded(Encoding.FLOAT, weight)
    scale = next((s for s in _SCALE_NAMES if has(f"{name}.{s}")), _SCALE_NAMES[0])
    if weight.dtype in ("U8", "I8") and weight.shape == (shape[0], shape[1] // 2):
        return _four_bits(find, name, weight, find(f"{name}.{scale}"), shape)
    check(weight, shape, (FP8, *FLOATS))
    scales = find(f"{name}.{scale}")
    return Encoded(_of_fp8(scales, shape, scale), weight, scales)


def _of_fp8(scales: Stored, shape: tuple[int, int], name: str) -> Encoding:
    n, k = shape
    if scales.shape in ((), (1,), (1, 1)) and shape != (SCALE_BLOCK, SCALE_BLOCK):
        encoding = Encoding.TENSOR
    elif scales.shape in ((n,), (n, 1)) and name != _SCALE_NAMES[0]:
        encoding = Encoding.ROWS
    elif scales.shape == (n, k // 32) and scales.dtype in _EXPONENTS:
        return Encoding.MXFP8
    else:
        blocks = -(-n // SCALE_BLOCK), -(-k // SCALE_BLOCK)
        check(scales, blocks, SCALES)
        return Encoding.BLOCKS
    check(scales, scales.shape, FLOATS)
    return encoding


def _four_bits(
    find: Callable[[str], Stored], name: str, weight: Stored, scales: Stored, shape: tuple[int, int]
) -> Encoded:
    n, k = shape
    if scales.dtype == FP8:
        check(scales, (n, k // 16), (FP8,))
        whole = find(f"{name}.weight_scale_2")
        check(whole, whole.shape if whole.shape in ((), (1,)) else (), ("F32",))
        return Encoded(Encoding.NVFP4, weight, scales, whole)
    check(scales, (n, k // 32), _EXPONENTS)
    return Encoded(Encoding.MXFP4, weight, scales)


def _packed(find: Callable[[str], Stored], name: str, shape: tuple[int, int]) -> Encoded:
    """compressed-tensors' weights of 4 bits."""
    n, k = shape
    weight, scales = find(f"{name}.weight_packed"), find(f"{name}.weight_scale")
    if weight.dtype == "U8":
        check(weight, (n, k // 2), ("U8",))
        if scales.dtype in _EXPONENTS:
            check(scales, (n, k // 32), _EXPONENTS)
            return Encoded(Encoding.MXFP4, weight, scales)
        check(scales, (n, k // 16), (FP8,))
        whole = find(f"{name}.weight_global_scale")
        check(whole, whole.shape if whole.shape in ((), (1,)) else (1,), ("F32",))
        return Encoded(Encoding.NVFP4, weight, scales, whole, divides=True)
    check(weight, (n, k // 8), ("I32",))
    groups = scales.shape[1] if len(scales.shape) == 2 else 0
    if scales.shape[:1] != (n,) or groups < 1 or k % groups:
        raise CheckpointError(
            f"{scales.file}: {scales.name} shape: expected ({n}, a divisor of {k}), got {scales.shape}"
        )
    check(scales, scales.shape, FLOATS)
    return Encoded(Encoding.INT4, weight, scales)


def check(tensor: Stored, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    """Raise CheckpointError unless the tensor has this shape, and one of these dtypes."""
    for what, got, good, expected in (
        ("shape", tensor.shape, tensor.shape == shape, shape),
        ("dtype", tensor.dtype, tensor.dtype in dtypes, " or ".join(dtypes)),
    ):
        if not good:
            raise CheckpointError(f"{tensor.file}: {tensor.name} {what}: expected {expected}, got {got}")
