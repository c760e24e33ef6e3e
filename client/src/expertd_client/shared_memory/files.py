"""Files in /dev/shm, as memory that a server on the same machine can open by name."""

import mmap
import os
import secrets
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

FOLDER = Path("/dev/shm")
_PREFIX = "expertd-client"


class SharedFile:
    """`num_bytes` of zeros in a new file of this user's; removed by `close`, or when the process ends.

    A process that is killed leaves its file behind. Raises OSError, also if the memory is not available.

    prefix  of its name, which the server demands
    """

    def __init__(self, num_bytes: int, prefix: str = "") -> None:
        self.key = f"{prefix}{_PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
        path = FOLDER / self.key
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._remove = weakref.finalize(self, _remove, path, os.getpid())
        try:
            # A file that is merely made longer gets its memory when it is written to, or SIGBUS.
            os.posix_fallocate(descriptor, 0, num_bytes)
            self.data: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Remove the file; the memory stays for as long as it is used."""
        self._remove()


def _remove(path: Path, process: int) -> None:
    if os.getpid() == process:  # a forked child has no part in it
        path.unlink(missing_ok=True)
