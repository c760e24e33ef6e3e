"""Reads tensors of files into torch's, on any device, with several threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from expertd.service.device import device_of
from expertd.service.moe.tensor_file import TensorEntry, TensorFile

_PIECE_BYTES = 4 * 1024 * 1024  # that a thread reads at a time
_NUM_THREADS = 8  # storage that others share wants several requests at a time, whatever the cores
_SMALL_BYTES = 256 * 1024  # not worth a thread


class TensorReader:
    """Reads tensors in pieces, several at a time; those on a GPU get every piece as soon as it is read.

    For those, each thread has a pinned buffer of a piece's size. Use one reader for tensors of one
    device. Safe from any thread.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "expertd-reader")
        self._own = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()

    def read(self, file: TensorFile, tensor: TensorEntry, out: Tensor, start: int = 0) -> None:
        """Fill `out`, which is contiguous, with the bytes of `tensor` from byte `start` on.

        Raises TensorFileError if the file has been truncated.
        """
        if not out.numel():
            return
        flat = out.view(-1).view(torch.uint8)
        if out.nbytes <= _SMALL_BYTES:
            host = flat if flat.is_cpu else torch.empty(out.nbytes, dtype=torch.uint8)
            file.read(tensor, host.numpy().data, start)
            if host is not flat:
                flat.copy_(host)
            return
        read = _to_host if flat.is_cpu else self._to_device(flat)

        def piece(at: int) -> None:
            read(file, tensor, flat[at : at + _PIECE_BYTES], start + at)

        for _ in self._threads.map(piece, range(0, out.nbytes, _PIECE_BYTES)):
            """Raises what reading a piece has raised."""

    def _to_device(self, flat: Tensor) -> Callable[[TensorFile, TensorEntry, Tensor, int], None]:
        """What reads parts of `flat` after the work on the current stream."""
        device = device_of(flat.device)
        before = device.current_stream()

        def read(file: TensorFile, tensor: TensorEntry, part: Tensor, start: int) -> None:
            own = self._own
            if not hasattr(own, "buffer"):
                own.buffer, own.stream = device.pinned(_PIECE_BYTES), device.new_stream()
            piece = own.buffer[: len(part)]
            file.read(tensor, piece.numpy().data, start)
            with device.on(own.stream):
                own.stream.wait_stream(before)
                part.copy_(piece, non_blocking=True)
                own.stream.synchronize()

        return read


def _to_host(file: TensorFile, tensor: TensorEntry, part: Tensor, start: int) -> None:
    file.read(tensor, part.numpy().data, start)
