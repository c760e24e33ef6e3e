"""Decodes weights that are neither FP8 by blocks nor floats, to float32 [n, k]."""

from collections.abc import Callable

import torch
from torch import Tensor

from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.encodings import Encoded, Encoding
from expertd.service.checkpoints.files import Stored

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(encoded: Encoded, load: Callable[[Stored], Tensor], device: torch.device) -> Tensor:
    """The weight in float32 on `device`; `load` reads a tensor, or some of its rows."""
    assert encoded.scales is not None
    values, scales = load(encoded.weight).to(device), load(encoded.scales).to(device)
    if encoded.encoding in (Encoding.NVFP4, Encoding.MXFP4):
        values = _fp4(values)
    elif encoded.encoding is Encoding.INT4:
        values = _int4(values)
    else:
        values = values.to(torch.float32)
    return values * _spread(_numbers(scales) * _whole(encoded, load, device), values)


def quantize_by_powers(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantize_blocks`, with scales that are powers of two: numbers that have such scales stay exact.

    All of them do unless some in a block are so much smaller than its largest that FP8 underflows.
    """
    size = matrix.shape
    matrix = torch.nn.functional.pad(matrix, (0, -size[1] % SCALE_BLOCK, 0, -size[0] % SCALE_BLOCK))
    n, k = matrix.shape
    blocks = matrix.view(n // SCALE_BLOCK, SCALE_BLOCK, k // SCALE_BLOCK, SCALE_BLOCK)
    largest = blocks.abs().amax(dim=(1, 3)).clamp(min=torch.finfo(torch.float32).tiny)
    scales = torch.exp2((largest / torch.finfo(torch.float8_e4m3fn).max).log2().ceil())
    data = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return data.view(n, k)[: size[0], : size[1]], scales


def _fp4(packed: Tensor) -> Tensor:
    """E2M1 numbers [n, k], two in a byte: the first in its low bits."""
    codes = packed.view(torch.uint8)
    values = [*_E2M1, *(-value for value in _E2M1)]
    table = torch.tensor(values, dtype=torch.float32, device=packed.device)
    return table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()]


def _int4(packed: Tensor) -> Tensor:
    """Numbers from -8 to 7, with 8 added, eight in an int32: the first in its low bits."""
    shifts = torch.arange(0, 32, 4, device=packed.device)
    return ((packed[..., None].long() >> shifts & 15) - 8).flatten(-2).to(torch.float32)


def _numbers(scales: Tensor) -> Tensor:
    """The scales in float32; a byte is an exponent."""
    if scales.dtype == torch.uint8:
        scales = scales.view(torch.float8_e8m0fnu)
    return scales.to(torch.float32)


def _whole(encoded: Encoded, load: Callable[[Stored], Tensor], device: torch.device) -> Tensor | float:
    """What all scales are multiplied by."""
    if encoded.whole is None:
        return 1.0
    whole = load(encoded.whole).to(device).to(torch.float32)
    return 1 / whole if encoded.divides else whole


def _spread(scales: Tensor, values: Tensor) -> Tensor:
    """A scale for each value: they stand for a tensor, a row, or a group of columns each."""
    if scales.numel() == 1:
        return scales.reshape(1, 1)
    scales = scales.view(values.shape[0], -1)
    return scales.repeat_interleave(values.shape[1] // scales.shape[1], dim=1)
