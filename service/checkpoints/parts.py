"""Reads tensors of a checkpoint's files, whole or in part."""

from collections.abc import Callable

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

    def loader(self, matrix: Matrix) -> Callable[[Stored], Tensor]:
        """What reads of a tensor of the matrix's weight, or of all experts', what its expert has."""
        layout = matrix.encoded.layout
        return lambda stored: self.of_expert(stored, matrix.expert if layout.is_of_all(stored) else None)

    def part(self, matrix: Matrix) -> Tensor:
        """As `read_part`, to a new tensor."""
        out = self._empty(matrix.encoded.weight, (len(matrix.rows), len(matrix.columns)))
        self.read_part(matrix, out)
        return out

    def read_part(self, matrix: Matrix, out: Tensor) -> None:
        """Fill `out` with the matrix's values, as they are in the file."""
        stored, transposed = matrix.encoded.weight, matrix.encoded.layout.transposed
        rows, columns = (matrix.columns, matrix.rows) if transposed else (matrix.rows, matrix.columns)
        width = stored.shape[-1]
        if rows.step == 1 and len(columns) == width:
            directly = out.is_contiguous() and not transposed
            block = out if directly else self._empty(stored, (len(rows), width))
            row = (matrix.expert or 0) * stored.shape[-2] + rows.start
            self._read(stored, block, row * width * out.itemsize)
        else:
            block = self._around(stored, matrix.expert)[_slice(rows), _slice(columns)]
        if block is not out:
            out.copy_(block.t() if transposed else block)

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


def _slice(part: range) -> slice:
    return slice(part.start, part.stop, part.step)
