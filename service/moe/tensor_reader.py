"""Reads tensors of files into torch's, on any device, with several threads."""

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor

from expertd.service.moe.tensor_file import TensorEntry, TensorFile

PIECE_BYTES = 4 * 1024 * 1024
"""A thread reads so much of a file at a time, between multiples of it."""
NUM_THREADS = 8
"""Storage that others share wants several requests at a time, also where there are fewer cores."""
_SMALL_BYTES = 256 * 1024  # not worth a thread


class TensorReader:
    """Reads large tensors around the page cache, unless that has them or the file system refuses.

    Each thread has a buffer of PIECE_BYTES, which is page-locked for tensors on a GPU: they get every piece
    as soon as it is read. Use one reader for tensors of one device. Safe from any thread.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "expertd-reader")
        self._own = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown()

    def read(
        self, file: TensorFile, tensor: TensorEntry, out: Tensor, start: int = 0, *, cached: bool = False
    ) -> None:
        """Fill `out`, which is contiguous, with the bytes of `tensor` from byte `start` on.

        cached  through the page cache in any case: other processes of this host read the same bytes

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
        read = self._to_host if flat.is_cpu else self._to_device(flat)
        begin = tensor.start + start
        cuts = range(begin - begin % PIECE_BYTES + PIECE_BYTES, begin + out.nbytes, PIECE_BYTES)
        bounds = [0, *(cut - begin for cut in cuts), out.nbytes]

        def piece(at: int, end: int) -> None:
            direct = not cached and file.can_read_direct and not file.is_cached(tensor, start + at, end - at)
            read(file, tensor, flat[at:end], start + at, direct)

        for _ in self._threads.map(piece, bounds, bounds[1:]):
            """Raises what reading a piece has raised."""

    def _to_host(self, file: TensorFile, tensor: TensorEntry, part: Tensor, start: int, direct: bool) -> None:
        into = part.numpy()
        if not direct:
            file.read(tensor, into.data, start)
            return
        if not hasattr(self._own, "buffer"):
            self._own.buffer = memoryview(mmap.mmap(-1, PIECE_BYTES))  # memory of whole pages
        got = file.read_direct(tensor, self._own.buffer, start, len(into))
        np.copyto(into, np.frombuffer(got, np.uint8))

    def _to_device(self, flat: Tensor) -> Callable[[TensorFile, TensorEntry, Tensor, int, bool], None]:
        """What reads parts of `flat` after the work on the current stream."""
        before = torch.cuda.current_stream(flat.device)

        def read(file: TensorFile, tensor: TensorEntry, part: Tensor, start: int, direct: bool) -> None:
            own = self._own
            if not hasattr(own, "buffer"):
                with torch.cuda.device(flat.device):  # a new thread has the first one
                    own.buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
                    own.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            into: memoryview = own.buffer.numpy().data
            if direct:
                got = file.read_direct(tensor, into, start, len(part))
            else:
                got = into[: len(part)]
                file.read(tensor, got, start)
            with torch.cuda.stream(own.stream):
                own.stream.wait_stream(before)
                part.copy_(torch.frombuffer(got, dtype=torch.uint8), non_blocking=True)
                own.stream.synchronize()

        return read
