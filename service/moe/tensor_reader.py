"""Reads tensors of files into torch's, on any device."""

import os
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from expertd.service.moe.tensor_file import TensorEntry, TensorFile

_PIECE_BYTES = 1024 * 1024  # that one thread reads at a time
_MOST_THREADS = 4
_BUFFER_BYTES = 32 * 1024 * 1024


class TensorReader:
    """Reads to tensors on the CPU in place, to others through a buffer.

    Large tensors are read by several threads: the first touch of memory takes longer than copying to it.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._threads = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "expertd-reader")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()

    def read(
        self, file: TensorFile, tensor: TensorEntry, out: Tensor, start: int = 0, stride: int = 0
    ) -> None:
        """Fill `out`, which is contiguous, with the bytes of `tensor` from byte `start` on.

        stride  bytes in the file from one row of `out` [rows, columns] to the next; 0: no bytes between them

        Raises TensorFileError if the file has been truncated.
        """
        if not out.numel():
            return
        flat = out.view(-1).view(torch.uint8)
        width = out.nbytes // len(out)
        if stride not in (0, width):
            host = flat if flat.is_cpu else torch.empty(out.nbytes, dtype=torch.uint8)
            into: memoryview = host.numpy().data
            for row in range(len(out)):
                file.read(tensor, into[row * width : (row + 1) * width], start + row * stride)
            if host is not flat:
                flat.copy_(host)
        elif flat.is_cpu:
            self._read(file, tensor, flat.numpy().data, start)
        else:
            self._copy(file, tensor, flat, start)

    def _copy(self, file: TensorFile, tensor: TensorEntry, flat: Tensor, start: int) -> None:
        """Read to another device."""
        if self._buffer is None:  # page-locked: the GPU then copies several times as fast
            self._buffer = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=flat.is_cuda)
        for at in range(0, len(flat), _BUFFER_BYTES):
            part = flat[at : at + _BUFFER_BYTES]
            host = self._buffer[: len(part)]
            self._read(file, tensor, host.numpy().data, start + at)
            part.copy_(host)

    def _read(self, file: TensorFile, tensor: TensorEntry, into: memoryview, start: int) -> None:
        if len(into) <= _PIECE_BYTES:
            file.read(tensor, into, start)
            return

        def piece(at: int) -> None:
            file.read(tensor, into[at : at + _PIECE_BYTES], start + at)

        for _ in self._threads.map(piece, range(0, len(into), _PIECE_BYTES)):
            """Raises what reading a piece has raised."""
