"""Reads the weights of one MoE layer from a checkpoint's files."""

from collections.abc import Callable

import torch
from torch import Tensor

from expertd.kernels import Quantized, quantize_blocks
from expertd.limits import SCALE_BLOCK
from expertd.service.checkpoints import CheckpointError, LayerSource, Matrix
from expertd.service.checkpoints.files import OpenFiles, Stored
from expertd.service.moe.tensor_file import TensorFileError
from expertd.service.moe.tensor_reader import TensorReader
from expertd.service.moe.weights import ExpertWeights

_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}

BytesRead = Callable[[int], None]


def read_layer(source: LayerSource, device: torch.device | str, progress: BytesRead) -> ExpertWeights:
    """The layer's weights on `device`, gate and up fused. FP8 is copied bit for bit, others are quantized.

    `progress` is called with the bytes of each matrix after it is read, and may raise to stop. Needs memory
    for the layer and one more matrix. Raises CheckpointError for weights or scales that are not finite, and
    if a file has changed since `source` was found.
    """
    gate, _, down = source.groups[0]
    h, i, num_groups = len(gate.columns), len(gate.rows), len(source.groups)
    gate_up_out, down_out = _empty(num_groups, 2 * i, h, device), _empty(num_groups, h, i, device)
    with OpenFiles() as files, TensorReader() as tensors:
        reader = _Reader(files, tensors)
        router = _plain(reader, source.router, device)
        bias = None if source.router_bias is None else _plain(reader, source.router_bias, device)
        for group, (gate, up, down) in enumerate(source.groups):
            for matrix, out in (
                (gate, _rows(gate_up_out, group, 0, i)),
                (up, _rows(gate_up_out, group, i, i)),
                (down, _rows(down_out, group, 0, h)),
            ):
                _read(reader, matrix, out)
                progress(matrix.num_bytes)
    return ExpertWeights(router, gate_up_out, down_out, bias)


class _Reader:
    """Reads tensors, or parts of matrices, of open files."""

    def __init__(self, files: OpenFiles, reader: TensorReader) -> None:
        self._files = files
        self._reader = reader

    def read(
        self, stored: Stored, out: Tensor, rows: slice | None = None, columns: slice | None = None
    ) -> None:
        """Fill `out` with a tensor, or with these rows and columns of a matrix. Raises CheckpointError."""
        file = self._files[stored.file]
        tensor = file.tensors.get(stored.name)
        if tensor is None or (tensor.dtype, tensor.shape) != (stored.dtype, stored.shape):
            expected = f"{stored.dtype} of shape {stored.shape}, as when it was found"
            got = "none" if tensor is None else f"{tensor.dtype} of shape {tensor.shape}"
            raise CheckpointError(f"{stored.file}: {stored.name}: expected {expected}, got {got}")
        start = stride = 0
        if rows is not None and columns is not None:
            stride = stored.shape[1] * out.itemsize
            start = rows.start * stride + columns.start * out.itemsize
        try:
            self._reader.read(file, tensor, out, start, stride)
        except TensorFileError as error:
            raise CheckpointError(str(error)) from error


def _read(reader: _Reader, matrix: Matrix, out: Quantized) -> None:
    rows, columns = _slice(matrix.rows), _slice(matrix.columns)
    device = out.data.device
    if matrix.scales is None:
        weight = torch.empty(out.data.shape, dtype=_DTYPES[matrix.weight.dtype], device=device)
        reader.read(matrix.weight, weight, rows, columns)
        data, scales = quantize_blocks(weight)
        out.data.view(torch.uint8).copy_(data.view(torch.uint8))
    else:
        reader.read(matrix.weight, out.data, rows, columns)
        scales = torch.empty(out.scales.shape, dtype=_DTYPES[matrix.scales.dtype], device=device)
        blocks = _slice(matrix.rows, SCALE_BLOCK), _slice(matrix.columns, SCALE_BLOCK)
        reader.read(matrix.scales, scales, *blocks)
    bits = out.data.view(torch.uint8)
    out.scales.copy_(scales.to(torch.float32))  # exact: fp32 can represent bf16 and e8m0 scales
    # e4m3 has no infinity, and two NaNs: the largest byte and the largest signed one. Reductions are fast.
    has_nan = bool(bits.amax() == 0xFF) or bool(bits.view(torch.int8).amax() == 0x7F)
    if has_nan or not out.scales.isfinite().all():
        raise _not_finite(matrix.weight)
    if (out.scales < 0).any():
        raise CheckpointError(
            f"{matrix.weight.file}: {matrix.weight.name}: expected scales of at least 0, got negative ones"
        )


def _plain(reader: _Reader, tensor: Stored, device: torch.device | str) -> Tensor:
    stored = torch.empty(tensor.shape, dtype=_DTYPES[tensor.dtype], device=device)
    reader.read(tensor, stored)
    values = stored.to(torch.float32)
    if not values.isfinite().all():
        raise _not_finite(tensor)
    return values


def _not_finite(tensor: Stored) -> CheckpointError:
    return CheckpointError(f"{tensor.file}: {tensor.name}: expected finite numbers, got others")


def _empty(num_groups: int, n: int, k: int, device: torch.device | str) -> Quantized:
    data = torch.empty((num_groups, n, k), dtype=torch.float8_e4m3fn, device=device)
    return Quantized(data, torch.empty((num_groups, n // SCALE_BLOCK, k // SCALE_BLOCK), device=device))


def _rows(out: Quantized, group: int, first: int, count: int) -> Quantized:
    blocks = slice(first // SCALE_BLOCK, (first + count) // SCALE_BLOCK)
    return Quantized(out.data[group, first : first + count], out.scales[group, blocks])


def _slice(part: range, unit: int = 1) -> slice:
    return slice(part.start // unit, part.stop // unit)
