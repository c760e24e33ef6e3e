"""Files in /dev/shm, as callers make them."""

import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expertd.service.memory.system import FOLDER


@dataclass(frozen=True)
class ShmFile:
    """A file in /dev/shm, with its name and descriptor."""

    key: str
    fd: int

    def write(self, values: npt.NDArray[Any] | bytes, offset: int = 0) -> None:
        """Write `values` at `offset`."""
        os.pwrite(self.fd, values if isinstance(values, bytes) else values.tobytes(), offset)

    def read(self, num_bytes: int, offset: int = 0) -> bytes:
        """`num_bytes` from `offset` on."""
        return os.pread(self.fd, num_bytes, offset)

    def floats(self, num_tokens: int, columns: int, offset: int = 0) -> npt.NDArray[np.float32]:
        """FP32 values [num_tokens, columns] from `offset` on."""
        data = self.read(4 * num_tokens * columns, offset)
        return np.frombuffer(data, np.float32).reshape(num_tokens, columns)

    def times_open(self) -> int:
        """How often this process has the file open, besides the test's own descriptor."""
        open_files = [path.readlink().name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return open_files.count(self.key) - 1

    def is_mapped(self) -> bool:
        """Whether this process maps the file."""
        return self.key in Path("/proc/self/maps").read_text()

    def unlink(self) -> None:
        """Remove the name."""
        (FOLDER / self.key).unlink()


@contextmanager
def shm_file(num_bytes: int = 4 * mmap.PAGESIZE) -> Iterator[ShmFile]:
    """A new file of `num_bytes`, removed at the end."""
    key = f"expertd-test-{secrets.token_hex(8)}"
    fd = os.open(FOLDER / key, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.ftruncate(fd, num_bytes)
    try:
        yield ShmFile(key, fd)
    finally:
        os.close(fd)
        with suppress(FileNotFoundError):
            (FOLDER / key).unlink()
