"""A file of /dev/shm that a caller made and may shrink at any time, as memory that a request names.

The CPU never touches a mapping of such a file: an access past the file's end raises SIGBUS, and no check
before it helps, because the caller may shrink the file between the two. So the CPU copies with preadv and
pwritev, which then move fewer bytes instead. A device reads and writes the file in place, through a mapping
whose pages are pinned when they are registered: they outlive a truncation of the file, so that no copy of
the device can fault, and the caller merely no longer sees them.
"""

import mmap
import os
import stat
from pathlib import Path

import numpy as np

from expertd.service.memory.span import Mapped, Register, Span, Unregister

FOLDER = Path("/dev/shm")


class RegionError(ValueError):
    """A region cannot be registered or used as asked; the text is one sentence for the caller."""


class SystemMemory:
    """`num_bytes` at `offset` of the file `key`: mapped and registered with a device, or only copied.

    register  makes the mapping accessible to the device; None: the CPU copies, and nothing is mapped

    Raises RegionError for a key that names no file in /dev/shm, and for a file that is too short.
    """

    def __init__(self, key: str, offset: int, num_bytes: int, register: Register | None) -> None:
        self.key = file_name(key)
        self.start = offset
        self.num_bytes = num_bytes
        self._fd = _open(self.key)
        self._map: mmap.mmap | None = None
        self._unregister: Unregister | None = None
        try:
            status = os.fstat(self._fd)
            self.identity = (status.st_dev, status.st_ino)
            if not stat.S_ISREG(status.st_mode):
                raise RegionError(f"key: expected the name of a regular file, got {key!a:.80}")
            if status.st_size < offset + num_bytes:
                raise RegionError(
                    f"offset and byte_size: expected to lie within the {status.st_size} bytes of "
                    f"{key!a:.80}, got {num_bytes} bytes at {offset}"
                )
            if register is not None:
                self._address = self._registered(register)
        except BaseException:
            self.close()
            raise

    @property
    def in_place(self) -> bool:
        """Whether a device accesses the memory by address."""
        return self._map is not None

    def span(self, offset: int, num_bytes: int) -> Span:
        """A part of the memory for the device, while the file has it. Raises RegionError if it was shrunk."""
        self._check(offset, num_bytes)
        return Span(self._address + offset, num_bytes, owner=self)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on. Raises RegionError if the file was shrunk."""
        done = 0
        while done < len(target):
            count = os.preadv(self._fd, [target[done:]], self.start + offset + done)
            if count == 0:
                raise _shrunk(self.start + offset + len(target), self._size())
            done += count

    def write(self, offset: int, source: memoryview) -> None:
        """Write `source` at `offset`. Raises RegionError if the file was shrunk, or has no room in memory."""
        self._check(offset, len(source))  # pwritev would extend the file again
        done = 0
        while done < len(source):
            try:
                done += os.pwritev(self._fd, [source[done:]], self.start + offset + done)
            except OSError as error:
                text = f"expected room for {len(source)} bytes in the region's file, got {error.strerror}"
                raise RegionError(text) from error

    def is_unlinked(self) -> bool:
        """Whether the file has no name any more."""
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        """Unregister, unmap and close. Nothing may use the memory any more."""
        if self._unregister is not None:
            self._unregister()
            self._unregister = None
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _registered(self, register: Register) -> int:
        first = self.start - self.start % mmap.PAGESIZE
        size = self.start + self.num_bytes - first
        try:
            self._map = mmap.mmap(self._fd, size, offset=first)
            address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
            self._unregister = register(Mapped(address, size, self._fd, first))
        except (OSError, ValueError, RuntimeError) as error:
            text = (
                f"byte_size: expected memory that the device can access, got {self.num_bytes} bytes: {error}"
            )
            raise RegionError(text) from error
        return address + self.start - first

    def _check(self, offset: int, num_bytes: int) -> None:
        size = self._size()
        if size < self.start + offset + num_bytes:
            raise _shrunk(self.start + offset + num_bytes, size)

    def _size(self) -> int:
        return os.fstat(self._fd).st_size


def _shrunk(expected: int, size: int) -> RegionError:
    return RegionError(f"expected a file of at least {expected} bytes, got one that was shrunk to {size}")


def file_name(key: str) -> str:
    """The name in /dev/shm that `key` stands for; a leading slash is usual. Raises RegionError."""
    name = key.removeprefix("/")
    if "/" in name or not name.isprintable() or not name.strip(".") or len(name.encode()) > 255:
        raise RegionError(f"key: expected the name of a file in {FOLDER}, got {key!a:.80}")
    return name


def _open(key: str) -> int:
    try:
        # O_NONBLOCK: a FIFO must not block; O_NOFOLLOW: a link could lead out of the folder.
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        return os.open(FOLDER / key, flags)
    except OSError as error:
        text = f"key: expected a file in {FOLDER} that the server may read and write, got {key!a:.80}"
        raise RegionError(f"{text}: {error.strerror}") from error
