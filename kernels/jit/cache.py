"""Compiled binaries on disk, shared by processes: each entry proves that it is whole, or is built again."""

import hashlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

CACHE_DIR_VARIABLE = "EXPERTD_CACHE_DIR"
_DIGEST_BYTES = hashlib.sha256().digest_size

logger = logging.getLogger(__name__)


def cache_directory() -> Path:
    """Where binaries are kept: $EXPERTD_CACHE_DIR, else the user's cache directory."""
    configured = os.environ.get(CACHE_DIR_VARIABLE)
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "expertd"


class DiskCache:
    """Bytes by key, written whole or not at all; the last 32 bytes of a file are the SHA-256 of the others."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def path(self, key: str) -> Path:
        """The file of an entry, whether it exists or not."""
        return self.directory / f"{key}.bin"

    def get(self, key: str) -> bytes | None:
        """The entry's bytes; None if there is none, or a damaged one (which is logged)."""
        try:
            content = self.path(key).read_bytes()
        except FileNotFoundError:
            return None
        body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if hashlib.sha256(body).digest() != digest:
            logger.warning(
                "cache entry %s is damaged (%d bytes) and is built again", self.path(key), len(content)
            )
            return None
        return body

    def put(self, key: str, body: bytes) -> None:
        """Store an entry; a reader in another process sees all of it or none."""
        aside = self.path(key).with_suffix(f".{os.getpid()}.part")
        aside.write_bytes(body + hashlib.sha256(body).digest())
        aside.replace(self.path(key))

    @contextmanager
    def locked(self, key: str) -> Iterator[None]:
        """Hold the entry against other threads and processes, so that one of them builds and the others read."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with FileLock(self.directory / f"{key}.lock"):
            yield
