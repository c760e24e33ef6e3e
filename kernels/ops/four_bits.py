"""Weights of four bits: packed, decoded, and made of floats.

Sources: the OCP Microscaling specification 1.0 (e2m1, UE8M0), NVIDIA's description of NVFP4, and the
pack-quantized format of compressed-tensors.
"""

from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from expertd.kernels.ops.quantize import E4M3_MAX, Quantized, dequantize_blocks
from expertd.limits import SCALE_BLOCK
from expertd.weight_format import WeightFormat

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_MAX, _E2M1_LARGEST_EXPONENT = 6.0, 2
_E8M0_BIAS = 127
_INT4_MAX = 7.0


class FourBits(NamedTuple):
    """Codes of four bits, and what to multiply their values by: weights [G, N, K], or [N, K] of one group.

    data    uint8 [G, N, K/2]: column 2i is in the low half of byte i. Codes are e2m1, or two's complement
            from -8 to 7 (INT4)
    scales  [G, N, K/S], each for S columns: MXFP4 uint8, 2**(byte - 127), S = 32; INT4 bfloat16, float16 or
            float32, S = 32 or 128; NVFP4 e4m3, S = 16
    format  one of these three
    whole   NVFP4: fp32 [G, N], which multiplies the scales of a row; else None
    """

    data: Tensor
    scales: Tensor
    format: WeightFormat
    whole: Tensor | None = None

    @property
    def group_size(self) -> int:
        """S."""
        return 2 * self.data.shape[-1] // max(self.scales.shape[-1], 1)


Weights = Quantized | FourBits
"""Weights [G, N, K] in any format: FP8 with a scale per 128x128 block, or four bits."""
W = TypeVar("W", bound=Weights)
SCALE_DTYPES = {
    WeightFormat.FP8: (torch.float32,),
    WeightFormat.MXFP4: (torch.uint8,),
    WeightFormat.INT4: (torch.bfloat16, torch.float16, torch.float32),
    WeightFormat.NVFP4: (torch.float8_e4m3fn,),
}
"""The dtypes of scales, in each format."""


def format_of(weights: Weights) -> WeightFormat:
    """The format of weights."""
    return weights.format if isinstance(weights, FourBits) else WeightFormat.FP8


def group_size_of(weights: Weights) -> int:
    """Columns that a scale stands for."""
    return weights.group_size if isinstance(weights, FourBits) else SCALE_BLOCK


def columns_of(weights: Weights) -> int:
    """K."""
    return weights.data.shape[-1] * (2 if isinstance(weights, FourBits) else 1)


def tensors_of(weights: Weights) -> tuple[Tensor, ...]:
    """The data, the scales, and `whole` if there is one."""
    if isinstance(weights, Quantized):
        return tuple(weights)
    last = () if weights.whole is None else (weights.whole,)
    return weights.data, weights.scales, *last


def mapped(weights: W, change: Callable[[Tensor], Tensor]) -> W:
    """Weights of the same format, with what `change` makes of each tensor."""
    made = weights._replace(data=change(weights.data), scales=change(weights.scales))
    if isinstance(made, FourBits) and made.whole is not None:
        made = made._replace(whole=change(made.whole))
    return cast(W, made)


def with_data(weights: W, data: Tensor) -> W:
    """The same weights with other data."""
    return cast(W, weights._replace(data=data))


def of_tensors(weights: W, made: Callable[[Tensor, Tensor], Tensor], tensors: Iterable[Tensor]) -> W:
    """Weights of the same format: `made` of each tensor of `weights` and the next one given."""
    given = iter(tensors)
    return mapped(weights, lambda own: made(own, next(given)))


def groups_of(weights: W) -> Iterator[W]:
    """Each group [N, K] of weights [G, N, K]."""
    for group in range(weights.data.shape[0]):
        yield mapped(weights, itemgetter(group))


@torch.no_grad()
def decode(weights: Weights, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
    """Weights as floats [(G,) N, K], contiguous; also FP8, see `dequantize_blocks`.

    out  of this shape and `dtype`, to write to; None: a new tensor

    Exact in float32 for MXFP4, and for INT4 with scales of 16 bits; with others, a product is rounded to it
    once. Then all are rounded to `dtype`. Needs temporary memory for one group. Raises ValueError.
    """
    if isinstance(weights, Quantized):
        return dequantize_blocks(*weights, dtype, out)
    size = (*weights.data.shape[:-1], columns_of(weights))
    if out is None:
        out = torch.empty(size, dtype=dtype, device=weights.data.device)
    elif (out.shape, out.dtype) != (size, dtype):
        raise ValueError(f"out: expected {size} of {dtype}, got {tuple(out.shape)} of {out.dtype}")
    if len(size) == 2:
        out.copy_(_decoded(weights))
        return out
    for group, floats in zip(groups_of(weights), out, strict=True):
        floats.copy_(_decoded(group))
    return out


def codes_of(data: Tensor) -> Tensor:
    """The codes [..., K] of uint8 data [..., K/2], from 0 to 15."""
    return torch.stack((data & 15, data >> 4), -1).flatten(-2)


def packed_codes(codes: Tensor) -> Tensor:
    """uint8 [..., K/2] of codes [..., K], integers of which the lowest four bits count."""
    pairs = (codes.to(torch.uint8) & 15).reshape(*codes.shape[:-1], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def quantize_mxfp4(w: Tensor) -> FourBits:
    """Round floats [(G,) N, K] to MXFP4, as the specification says: the largest power that e2m1 can hold."""
    groups, amax = _groups(w, 32)
    exponents = torch.frexp(amax).exponent - 1 - _E2M1_LARGEST_EXPONENT
    scales = (exponents + _E8M0_BIAS).clamp_(0, 254).to(torch.float32)
    codes = _to_e2m1(groups / torch.exp2(scales - _E8M0_BIAS)[..., None])
    return FourBits(packed_codes(codes.flatten(-2)), scales.to(torch.uint8), WeightFormat.MXFP4)


def quantize_int4(w: Tensor, group_size: int = 32, dtype: torch.dtype = torch.bfloat16) -> FourBits:
    """Round floats [(G,) N, K] to INT4: a scale (amax/7) of `dtype` per `group_size` columns."""
    groups, amax = _groups(w, group_size)
    scales = (amax / _INT4_MAX).to(dtype)
    codes = (groups / scales.float().clamp(min=torch.finfo(dtype).tiny)[..., None]).round().clamp(-8, 7)
    return FourBits(packed_codes(codes.to(torch.int8).flatten(-2)), scales, WeightFormat.INT4)


def quantize_nvfp4(w: Tensor) -> FourBits:
    """Round floats [(G,) N, K] to NVFP4, with a scale of all scales (amax/(6*448)) for each group [N, K]."""
    groups, amax = _groups(w, 16)
    largest = amax.amax((-2, -1), keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    whole = (largest / (_E2M1_MAX * E4M3_MAX)).expand(*amax.shape[:-1], 1)
    scales = (amax / _E2M1_MAX / whole).to(torch.float8_e4m3fn)
    each = scales.float() * whole
    codes = _to_e2m1(groups / each.clamp(min=torch.finfo(torch.float32).tiny)[..., None])
    rows = whole[..., 0].contiguous()
    return FourBits(packed_codes(codes.flatten(-2)), scales, WeightFormat.NVFP4, rows)


def _decoded(weights: FourBits) -> Tensor:
    """fp32 [N, K] of one group."""
    codes, scales = codes_of(weights.data), weights.scales
    if weights.format is WeightFormat.INT4:
        values = ((codes ^ 8).to(torch.float32)).sub_(8)  # two's complement
    else:
        signed = [*_E2M1, *(-value for value in _E2M1)]
        table = torch.tensor(signed, dtype=torch.float32, device=codes.device)
        values = table[codes.int()]
    if weights.format is WeightFormat.MXFP4:
        scales = scales.view(torch.float8_e8m0fnu)
    groups = values.view(*scales.shape, -1)
    groups.mul_(scales.to(torch.float32)[..., None])
    return values if weights.whole is None else values.mul_(weights.whole[..., None])


def _groups(w: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """fp32 [..., K / size, size], and the largest absolute value of each."""
    groups = w.detach().to(torch.float32).reshape(*w.shape[:-1], -1, size)
    return groups, groups.abs().amax(-1)


def _to_e2m1(values: Tensor) -> Tensor:
    """The codes of the nearest values of e2m1, of two as near the one with an even code; too large: 6."""
    table = torch.tensor(_E2M1, dtype=torch.float32, device=values.device)
    middles = (table[1:] + table[:-1]) / 2
    size = values.abs()
    above = torch.bucketize(size, middles)  # in the middle: the lower one
    is_middle = (size[..., None] == middles[1::2]).any(-1)  # whose lower neighbor is odd
    return (above + is_middle).to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
