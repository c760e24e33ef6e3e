"""Decodes weights to float32 [n, k], and finds the scales of their blocks."""

from collections.abc import Callable

import torch
from torch import Tensor

from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints.encodings import Scales
from expertd.service.checkpoints.files import Stored
from expertd.service.checkpoints.layer import Matrix

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Load = Callable[[Stored], Tensor]
"""What a tensor has of the matrix's expert."""


def decode(matrix: Matrix, load: Load) -> Tensor:
    """The matrix in float32 [n, k]."""
    encoded, rows, columns = matrix.encoded, _slice(matrix.rows), _slice(matrix.columns)
    values = load(encoded.weight)
    values = values.flatten(1) if values.ndim == 3 else values
    values = values.t() if encoded.layout.transposed else values
    if values.shape[0] == encoded.shape[0]:
        values = _numbers(values[rows])[:, columns]
    else:  # numbers share bytes along n
        values = _numbers(values.t()).t()[rows, columns]
    return (values * scales_at(matrix, load, matrix.rows, matrix.columns)).contiguous()


def scales_at(matrix: Matrix, load: Load, rows: range, columns: range) -> Tensor:
    """What multiplies the weight's values at these rows and columns, in float32; [1, 1] if it is all one."""
    encoded = matrix.encoded
    assert encoded.scales is not None
    scales = _spread(encoded.scales, matrix, load, rows, columns)
    return scales if encoded.whole is None else scales * _spread(encoded.whole, matrix, load, rows, columns)


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


def _numbers(values: Tensor) -> Tensor:
    """The numbers that elements hold, before scales; those of four bits come lowest bits first."""
    if values.dtype == torch.int32:  # from -8 to 7, with 8 added
        shifts = torch.arange(0, 32, 4, device=values.device)
        return ((values[..., None].long() >> shifts & 15) - 8).flatten(-2).to(torch.float32)
    if values.dtype in (torch.uint8, torch.int8):
        codes = values.contiguous().view(torch.uint8)
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=values.device)
        return table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).long()]
    return values.to(torch.float32)


def _spread(scales: Scales, matrix: Matrix, load: Load, rows: range, columns: range) -> Tensor:
    """The scale of each of these rows and columns of the weight."""
    values = load(scales.stored)
    if values.dtype == torch.uint8:  # an exponent
        values = values.view(torch.float8_e8m0fnu)
    grid = [-(-size // unit) for size, unit in zip(matrix.encoded.shape, scales.unit, strict=True)]
    if matrix.encoded.layout.transposed:
        values = values.reshape(grid[::-1]).t()
    values = values.reshape(grid).to(torch.float32)
    values = 1 / values if scales.divides else values
    for dim, (part, unit) in enumerate(zip((rows, columns), scales.unit, strict=True)):
        if grid[dim] > 1:
            at = torch.arange(part.start, part.stop, part.step, device=values.device) // unit
            values = values.index_select(dim, at)
    return values


def _slice(part: range) -> slice:
    return slice(part.start, part.stop, part.step)
