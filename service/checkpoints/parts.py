"""Reads tensors of a checkpoint's files, whole or in part."""

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
        self._read(stored, out, 0)
        return out

    def of_expert(self, stored: Stored, expert: int | None) -> Tensor:
        """What a tensor of all experts has of one, kept until another is read; None: a tensor of one."""
        if expert is None:
            return self.whole(stored)
        last = self._last.get(stored)
        if last is None or last[0] != expert:
            out = self._empty(stored, stored.shape[1:])
            self._read(stored, out, expert * out.nbytes)
            last = self._last[stored] = expert, out
        return last[1]

    def part(self, stored: Stored, matrix: Matrix, unit: int = 1) -> Tensor:
        """As `read_part`, to a new tensor."""
        out = self._empty(stored, (len(matrix.rows) // unit, len(matrix.columns) // unit))
        self.read_part(stored, matrix, out, unit)
        return out

    def read_part(self, stored: Stored, matrix: Matrix, out: Tensor, unit: int = 1) -> None:
        """Fill `out` with the matrix's part of a weight, or of scales for `unit` rows and columns."""
        rows, columns = (_units(part, unit) for part in (matrix.rows, matrix.columns))
        if matrix.transposed:
            rows, columns = columns, rows
        width = stored.shape[-1]
        if rows.step == 1 and len(columns) == width:
            block = self._empty(stored, (len(rows), width)) if matrix.transposed else out
            row = (matrix.expert or 0) * stored.shape[-2] + rows.start
            self._read(stored, block, row * width * out.itemsize)
        else:
            block = self._around(stored, matrix.expert)[_slice(rows), _slice(columns)]
        if block is not out:
            out.copy_(block.t() if matrix.transposed else block)

    def _around(self, stored: Stored, expert: int | None) -> Tensor:
        """A matrix of which others need the other columns or rows: it is read once for all of them."""
        if expert is not None:
            return self.of_expert(stored, expert)
        out = self._empty(stored, stored.shape)
        self._read(stored, out, 0)
        return out

    def _read(self, stored: Stored, out: Tensor, start: int) -> None:
        file = self._files[stored.file]
        tensor = file.tensors.get(stored.name)
        if tensor is None or (tensor.dtype, tensor.shape) != (stored.dtype, stored.shape):
            expected = f"{stored.dtype} of shape {stored.shape}, as when it was found"
            got = "none" if tensor is None else f"{tensor.dtype} of shape {tensor.shape}"
            raise CheckpointError(f"{stored.file}: {stored.name}: expected {expected}, got {got}")
        try:
            self._reader.read(file, tensor, out, start)
        except TensorFileError as error:
            raise CheckpointError(str(error)) from error

    def _empty(self, stored: Stored, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=_DTYPES[stored.dtype], device=self.device)


def _units(part: range, unit: int) -> range:
    """The scales of a range that begins and ends with whole units; 1: the range itself."""
    return part if unit == 1 else range(part.start // unit, part.stop // unit)


def _slice(part: range) -> slice:
    return slice(part.start, part.stop, part.step)
