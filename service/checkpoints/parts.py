"""Reads tensors of a checkpoint's files, whole or in part."""

from dataclasses import replace

import torch
from torch import Tensor

from expertd.service.checkpoints import CheckpointError, Matrix
from expertd.service.checkpoints.files import OpenFiles, Stored
from expertd.service.moe.tensor_file import TensorFileError
from expertd.service.moe.tensor_reader import TensorReader

_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
}


class PartReader:
    """Reads from open files to `device`. Its methods raise CheckpointError if a file has changed."""

    def __init__(self, files: OpenFiles, reader: TensorReader, device: torch.device) -> None:
        self._files = files
        self._reader = reader
        self.device = device
        self._last: dict[Stored, tuple[int, Tensor]] = {}

    def whole(self, stored: Stored) -> Tensor:
        """A tensor."""
        out = self._empty(stored, stored.shape)
        self._read(stored, out.view(-1), 0, 0)
        return out

    def of_expert(self, stored: Stored, expert: int | None) -> Tensor:
        """What a tensor of all experts has of one, kept until another is read; None: a tensor of one."""
        if expert is None:
            return self.whole(stored)
        last = self._last.get(stored)
        if last is None or last[0] != expert:
            out = self._empty(stored, stored.shape[1:])
            self._read(stored, out.view(-1), expert * out.nbytes, 0)
            last = self._last[stored] = expert, out
        return last[1]

    def part(self, stored: Stored, matrix: Matrix, unit: int = 1) -> Tensor:
        """As `read_part`, to a new tensor."""
        out = self._empty(stored, (len(matrix.rows) // unit, len(matrix.columns) // unit))
        self.read_part(stored, matrix, out, unit)
        return out

    def read_part(self, stored: Stored, matrix: Matrix, out: Tensor, unit: int = 1) -> None:
        """Fill `out` with the matrix's part of a weight, or of scales for `unit` rows and columns."""
        if (step := matrix.rows.step) > 1:
            whole = range(matrix.rows[0] // step * step, matrix.rows[-1] // step * step + step)
            out.copy_(self.part(stored, replace(matrix, rows=whole))[matrix.rows[0] % step :: step])
            return
        rows, columns = (range(r.start // unit, r.stop // unit) for r in (matrix.rows, matrix.columns))
        if matrix.transposed:
            turned = self._empty(stored, (len(columns), len(rows)))
            self._read_block(stored, turned, columns, rows, matrix.expert)
            out.copy_(turned.t())
        else:
            self._read_block(stored, out, rows, columns, matrix.expert)

    def _read_block(
        self, stored: Stored, out: Tensor, rows: range, columns: range, expert: int | None
    ) -> None:
        height, width = stored.shape[-2:]
        row = (expert or 0) * height + rows.start
        stride = width * out.itemsize
        self._read(stored, out, row * stride + columns.start * out.itemsize, stride)

    def _read(self, stored: Stored, out: Tensor, start: int, stride: int) -> None:
        file = self._files[stored.file]
        tensor = file.tensors.get(stored.name)
        if tensor is None or (tensor.dtype, tensor.shape) != (stored.dtype, stored.shape):
            expected = f"{stored.dtype} of shape {stored.shape}, as when it was found"
            got = "none" if tensor is None else f"{tensor.dtype} of shape {tensor.shape}"
            raise CheckpointError(f"{stored.file}: {stored.name}: expected {expected}, got {got}")
        try:
            self._reader.read(file, tensor, out, start, stride)
        except TensorFileError as error:
            raise CheckpointError(str(error)) from error

    def _empty(self, stored: Stored, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=_DTYPES[stored.dtype], device=self.device)
