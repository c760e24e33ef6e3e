"""Compiled binaries on disk, shared by processes. An entry that fails its checksum is rebuilt."""

import functools
import hashlib
import logging
import os
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

CACHE_DIR_VARIABLE = "EXPERTD_CACHE_DIR"
# Binaries installed with the package. Only `expertd kernels --build --bundle` writes there.
BUNDLE = Path(__file__).parent.parent / "built"
LOCK_SECONDS = 120.0  # far longer than a compilation: a lock held longer is stuck
_DIGEST_BYTES = hashlib.sha256().digest_size
_making_scratch = threading.Lock()

logger = logging.getLogger(__name__)


def cache_directory() -> Path:
    """$EXPERTD_CACHE_DIR, else expertd in the user's cache directory.

    Raises RuntimeError if neither is known (a user without a home directory).
    """
    configured = os.environ.get(CACHE_DIR_VARIABLE)
    if configured:
        return Path(configured)
    user_caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(user_caches) if user_caches else Path.home() / ".cache") / "expertd"
    except RuntimeError as error:
        raise RuntimeError(
            f"{CACHE_DIR_VARIABLE}: expected a directory, got neither it nor a home"
        ) from error


def check_writable(directory: Path) -> None:
    """Raise OSError, with a sentence, unless entries can be stored in `directory`, made if it is missing."""
    there = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"written to see whether that is possible")
            file.flush()
    except OSError as error:
        expected = "a folder that can be written to"
        raise OSError(f"kernel cache: expected {expected}, got {directory}: {error.strerror}") from error


def scratch_directory() -> "tempfile.TemporaryDirectory[str]":
    """A folder for what a compiler writes on its way, which is removed with the process."""
    with _making_scratch:  # threads that begin at once get the same one
        return _scratch_directory()


@functools.cache
def _scratch_directory() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="expertd-compiler-")


class DiskCache:
    """Maps keys to bytes; files are written atomically, and their last 32 bytes are the SHA-256 of the rest.

    A directory that cannot be read or written costs time and logs a warning, but is never an error: readable
    entries are used, and a binary that cannot be stored is still returned to the caller that built it.
    Entries that `directory` lacks are read from `bundle`, which is never written.
    """

    def __init__(self, directory: Path, bundle: Path | None = None) -> None:
        self.directory = directory
        self._bundle = bundle

    def path(self, key: str) -> Path:
        """The entry's file, whether or not it exists."""
        return self.directory / f"{key}.bin"

    def get(self, key: str) -> bytes | None:
        """The entry's bytes; None if it is missing, damaged or unreadable (the last two are logged)."""
        body = _read(self.path(key))
        if body is None and self._bundle is not None:
            return _read(self._bundle / self.path(key).name)
        return body

    def put(self, key: str, body: bytes) -> None:
        """Store an entry atomically: readers see all of it or none. Call with the lock held."""
        aside = self.directory / f"{key}.{uuid.uuid4().hex}.part"
        try:
            for left_behind in self.directory.glob(f"{key}.*.part"):
                left_behind.unlink(missing_ok=True)
            aside.write_bytes(body + hashlib.sha256(body).digest())
            aside.replace(self.path(key))
        except OSError as error:
            logger.warning("%s is not kept for the next start: %s", self.path(key), error)
            with suppress(OSError):
                aside.unlink(missing_ok=True)

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Lock the entry, so that one thread or process builds it while the others wait.

        Continues without a lock if none is available: work may be done twice, but entries stay whole.
        """
        lock = FileLock(self.directory / f"{key}.lock", timeout=LOCK_SECONDS)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        # filelock raises NotImplementedError on a file system without locks; its Timeout is an OSError.
        except (OSError, NotImplementedError) as error:
            logger.warning("the kernel cache %s is used without a lock: %s", self.directory, error)
        try:
            yield
        finally:
            lock.release()


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        logger.warning("cache entry cannot be read and is built again: %s", error)
        return None
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(body).digest() != digest:
        logger.warning("cache entry %s is damaged (%d bytes) and is built again", path, len(content))
        return None
    return body
