"""Quantization to FP8 (e4m3) with one fp32 scale per row and 128 columns, or per 128x128 block."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from expertd.kernels.ops.chunks import CHUNK_ELEMENTS, row_chunks
from expertd.limits import SCALE_BLOCK

E4M3_MAX = 448.0
_LARGEST_BITS = 0x7E  # of it, without the sign
# Below this a scale would be subnormal, which a GPU may flush to zero; such blocks get the smallest normal.
_MIN_AMAX = E4M3_MAX * torch.finfo(torch.float32).tiny


class Quantized(NamedTuple):
    """FP8 data, and the fp32 scales to multiply it by."""

    data: Tensor
    scales: Tensor


HiddenStates = Tensor | Quantized
"""Floats [T, H], or e4m3 [T, H] with scales [T, H/128]."""


def quantize_rows(x: Tensor) -> Quantized:
    """Quantize activations: one scale (amax/448) per row and 128 columns.

    x [..., K], float32, bfloat16 or float16, any strides, K a multiple of 128. Returns e4m3 data [..., K],
    contiguous, and fp32 scales [..., K/128]; with two dimensions or more the scales are column-major (stride
    1 along the rows), so that the Hopper kernel's loads coalesce. A block of zeros gets zeros and a positive
    scale; NaN and infinity affect only their own row. Raises ValueError. No host synchronization.
    """
    _check_float("x", x)
    x = x.detach()
    if x.ndim < 1 or x.shape[-1] % SCALE_BLOCK != 0:
        raise ValueError(
            f"x shape: expected [..., K] with K a multiple of {SCALE_BLOCK}, got {tuple(x.shape)}"
        )
    if x.ndim == 1:
        row = quantize_rows(x[None])
        return Quantized(row.data[0], row.scales[0])
    data = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = _empty_column_major((*x.shape[:-1], x.shape[-1] // SCALE_BLOCK), x.device)
    for x_part, data_part, scales_part in row_chunks(x, data, scales):
        blocks = _split_columns(x_part)
        torch.mul(_amax(blocks, (-1,)), 1 / E4M3_MAX, out=scales_part)
        _split_columns(data_part).copy_(torch.div(blocks, scales_part.unsqueeze(-1)))
    return Quantized(data, scales)


def quantize_blocks(w: Tensor) -> Quantized:
    """Quantize weights: one scale (amax/448) per block of 128x128; the last blocks may be ragged.

    w [N, K] or [G, N, K], float32, bfloat16 or float16, any strides. Returns e4m3 data of w's shape and fp32
    scales [(G,) ceil(N/128), ceil(K/128)], both contiguous. Needs temporary memory for one group only.
    Raises ValueError.
    """
    _check_float("w", w)
    _check_weight_ndim("w", w)
    w = w.detach()
    data = torch.empty(w.shape, dtype=torch.float8_e4m3fn, device=w.device)
    scales = torch.empty(_block_counts(w.shape), dtype=torch.float32, device=w.device)
    for weight, data_out, scales_out in zip(_groups(w), _groups(data), _groups(scales), strict=True):
        blocks = _to_blocks(weight)
        torch.mul(_amax(blocks, (-3, -1)), 1 / E4M3_MAX, out=scales_out)
        scaled = torch.div(blocks, scales_out[:, None, :, None])
        data_out.copy_(_from_blocks(scaled, weight.shape))
    return Quantized(data, scales)


@torch.no_grad()
def dequantize_rows(data: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Undo `quantize_rows`: data e4m3 [..., K] times scales fp32 [..., K/128], as `dtype`, contiguous.

    Has no gradients. Raises ValueError.
    """
    _check_quantized(data, scales)
    if data.ndim < 1 or data.shape[-1] % SCALE_BLOCK != 0:
        raise ValueError(
            f"data shape: expected [..., K] with K a multiple of {SCALE_BLOCK}, got {tuple(data.shape)}"
        )
    expected = (*data.shape[:-1], data.shape[-1] // SCALE_BLOCK)
    if scales.shape != expected:
        raise ValueError(f"scales shape: expected {expected}, got {tuple(scales.shape)}")
    if data.ndim == 1:
        return dequantize_rows(data[None], scales[None], dtype)[0]
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    for data_part, scales_part, out_part in row_chunks(data, scales, out):
        rows = _decode(data_part).to(torch.float32)
        _split_columns(rows).mul_(scales_part.unsqueeze(-1))
        out_part.copy_(rows)
    return out


@torch.no_grad()
def expand_rows(data: Tensor, scales: Tensor) -> Tensor:
    """fp32 rows [T, K] that `quantize_rows` turns into data e4m3 [T, K] and scales fp32 [T, K/128] again.

    That holds bit for bit for what `quantize_rows` has made, because the values of a block's largest elements
    (448) are chosen so that it finds the same scale; others are data times scales. With scales of any other
    origin, all are that, up to rounding. Has no gradients. Raises ValueError.
    """
    rows = dequantize_rows(data, scales)
    largest = scales * E4M3_MAX
    for step in (1, -1, 2, -2):  # fp32 numbers away: multiplying by 448 and by 1/448 rounds twice
        near = (scales * E4M3_MAX).view(torch.int32).add_(step).view(torch.float32)
        is_wrong = torch.mul(largest, 1 / E4M3_MAX) != scales
        largest = torch.where(is_wrong & (torch.mul(near, 1 / E4M3_MAX) == scales), near, largest)
    blocks, bits = _split_columns(rows), _split_columns(data.view(torch.uint8))
    blocks.copy_(torch.where((bits & 0x7F) == _LARGEST_BITS, largest.unsqueeze(-1).copysign(blocks), blocks))
    return rows


@torch.no_grad()
def dequantize_blocks(
    data: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32, out: Tensor | None = None
) -> Tensor:
    """Undo `quantize_blocks`: data e4m3 [(G,) N, K] times its block's scale, as `dtype`, contiguous.

    out  of data's shape, to write to; None: a new tensor

    Has no gradients. Raises ValueError.
    """
    _check_quantized(data, scales)
    _check_weight_ndim("data", data)
    if scales.shape != _block_counts(data.shape):
        raise ValueError(f"scales shape: expected {_block_counts(data.shape)}, got {tuple(scales.shape)}")
    if out is None:
        out = torch.empty(data.shape, dtype=dtype, device=data.device)
    elif (out.shape, out.dtype) != (data.shape, dtype):
        got = f"{tuple(out.shape)} of {out.dtype}"
        raise ValueError(f"out: expected {tuple(data.shape)} of {dtype}, got {got}")
    for group in zip(_groups(data), _groups(scales), _groups(out), strict=True):
        for data_in, scales_in, weight in _row_blocks(*group):
            blocks = _to_blocks(_decode(data_in).to(torch.float32)).mul_(scales_in[:, None, :, None])
            weight.copy_(_from_blocks(blocks, weight.shape))
    return out


def values_of(hidden_states: HiddenStates) -> Tensor:
    """The tensor [T, H] of `hidden_states`: the floats, or the FP8 data."""
    return hidden_states.data if isinstance(hidden_states, Quantized) else hidden_states


def as_floats(hidden_states: HiddenStates) -> Tensor:
    """Floats [T, H]: `hidden_states` as they are, or as `expand_rows` has them."""
    if isinstance(hidden_states, Tensor):
        return hidden_states
    return expand_rows(*(part.contiguous() for part in hidden_states))


def _row_blocks(data: Tensor, scales: Tensor, out: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The three of a matrix [N, K], as `row_chunks` splits rows, but into whole blocks."""
    if data.device.type != "cpu":
        return iter(((data, scales, out),))
    blocks = max(1, CHUNK_ELEMENTS // (SCALE_BLOCK * data.shape[1]))
    rows = blocks * SCALE_BLOCK
    return zip(torch.split(data, rows), torch.split(scales, blocks), torch.split(out, rows), strict=True)


def _amax(blocks: Tensor, dim: tuple[int, ...]) -> Tensor:
    # The caller multiplies by 1/448: GPUs do so even for a division, and all devices must agree.
    # amax and clamp both propagate NaN, so a NaN reaches its own block's scale.
    return blocks.abs().amax(dim).to(torch.float32).clamp_(min=_MIN_AMAX)


def _decode(data: Tensor) -> Tensor:
    """e4m3 as a wider type that holds every value exactly: float16 on a CPU, float32 elsewhere."""
    if data.device.type != "cpu" or data.numel() == 0:
        return data.to(torch.float32, memory_format=torch.contiguous_format)
    # On a CPU torch converts e4m3 one element at a time: 8.6 ms for 4M elements, against 1.3 ms here.
    if (data.view(torch.uint8) & 0x7F).amax() == 0x7F:  # shifted, NaN would become a number
        return data.to(torch.float16, memory_format=torch.contiguous_format)
    bits = data.view(torch.int8).to(torch.int16, memory_format=torch.contiguous_format)
    bits <<= 7  # the sign, extended, with e4m3's exponent and mantissa in float16's places ...
    bits &= -0x4080  # ... without the copies of the sign between them
    return bits.view(torch.float16).mul_(2.0**8)  # float16's exponent bias is 15, e4m3's is 7


def _split_columns(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-1], x.shape[-1] // SCALE_BLOCK, SCALE_BLOCK)


def _empty_column_major(shape: tuple[int, ...], device: torch.device) -> Tensor:
    transposed = (*shape[:-2], shape[-1], shape[-2])
    return torch.empty(transposed, dtype=torch.float32, device=device).transpose(-1, -2)


def _groups(w: Tensor) -> tuple[Tensor, ...]:
    return w.unbind(0) if w.ndim == 3 else (w,)


def _block_counts(shape: torch.Size) -> tuple[int, ...]:
    return (*shape[:-2], -(-shape[-2] // SCALE_BLOCK), -(-shape[-1] // SCALE_BLOCK))


def _to_blocks(weight: Tensor) -> Tensor:
    """[N, K] as [ceil(N/128), 128, ceil(K/128), 128], ragged ends filled with zeros."""
    n, k = weight.shape
    if n % SCALE_BLOCK or k % SCALE_BLOCK:
        weight = torch.nn.functional.pad(weight, (0, -k % SCALE_BLOCK, 0, -n % SCALE_BLOCK))
    return weight.view(
        weight.shape[0] // SCALE_BLOCK, SCALE_BLOCK, weight.shape[1] // SCALE_BLOCK, SCALE_BLOCK
    )


def _from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    return blocks.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]


def _check_float(name: str, x: Tensor) -> None:
    if not x.dtype.is_floating_point or x.dtype.itemsize not in (2, 4):
        raise ValueError(f"{name} dtype: expected float32, bfloat16 or float16, got {x.dtype}")


def _check_quantized(data: Tensor, scales: Tensor) -> None:
    # The bits of any other type would be read as e4m3.
    for name, tensor, dtype in (("data", data, torch.float8_e4m3fn), ("scales", scales, torch.float32)):
        if tensor.dtype != dtype:
            raise ValueError(f"{name} dtype: expected {dtype}, got {tensor.dtype}")


def _check_weight_ndim(name: str, w: Tensor) -> None:
    if w.ndim not in (2, 3) or 0 in w.shape:
        raise ValueError(f"{name} shape: expected [N, K] or [G, N, K] without a zero, got {tuple(w.shape)}")
