"""Users' files, and a folder for temporary ones; what cannot be read or written is one sentence."""

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What says that there is no room for a file; the last one: above `ulimit -f`."""
_FILE = "expected a file that can be written to"
_FOLDER = "expected a folder for temporary files (TMPDIR) that can be written to"


class UnwritableError(OSError):
    """Nothing can be written to `where`; the text is one sentence, and `errno` that of `error`."""

    def __init__(self, expected: str, where: object, error: OSError) -> None:
        super().__init__(error.errno, f"{expected}, got {where}: {error.strerror or error}")

    def __str__(self) -> str:
        return str(self.strerror)


def temporary_directory(what: str) -> Path:
    """Where temporary files go; what: what needs them. Raises UnwritableError."""
    try:
        directory = tempfile.gettempdir()
        error = _why_unwritable(directory)
    except FileNotFoundError as none:
        # It names all folders that it has tried, but not what is wrong with them.
        directory = (re.findall(r"'(.*?)'", str(none.strerror)) or ["none"])[0]
        error = _why_unwritable(directory) or none
    if error is not None:
        raise UnwritableError(f"{what}: {_FOLDER}", directory, error) from error
    return Path(directory)


@contextmanager
def temporary_folder(what: str) -> Iterator[Path]:
    """A new folder there that only this user may enter, until the block ends. Raises UnwritableError."""
    directory = temporary_directory(what)
    try:
        made = tempfile.TemporaryDirectory(prefix="expertd-", dir=directory, ignore_cleanup_errors=True)
    except OSError as error:
        raise UnwritableError(f"{what}: {_FOLDER}", directory, error) from error
    with made as name:
        yield Path(name)


def check_writable(path: Path, what: str) -> None:
    """Raise UnwritableError unless a file can be written at `path`. Leaves none, nor changes one."""
    error = None
    try:
        if not path.exists():
            error = _why_unwritable(path.parent)
        elif path.is_file():  # opening a pipe would block until it has a reader
            path.open("ab").close()
    except OSError as found:
        error = found
    if error is not None:
        raise UnwritableError(f"{what}: {_FILE}", path, error) from error


def write_whole(path: Path, content: bytes, what: str) -> None:
    """Write a file, or leave none. Raises UnwritableError."""
    try:
        path.write_bytes(content)
    except OSError as error:
        with suppress(OSError):
            if stat.S_ISREG(path.lstat().st_mode):
                path.unlink()
        raise UnwritableError(f"{what}: {_FILE}", path, error) from error


def _why_unwritable(folder: str | Path) -> OSError | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"written to see whether that is possible")
            file.flush()
    except OSError as error:
        return error
    return None


def check_readable(path: Path) -> None:
    """Raise ValueError (with the path) unless `path` is a regular file that this process can read."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would block until it has a writer
            raise ValueError(f"{path}: expected a regular file, got {_kind(path)}")
        with path.open("rb"):
            return
    except OSError as error:
        raise ValueError(f"{path}: {why_unreadable(path, error)}") from error


def read_text(path: Path) -> str:
    """The UTF-8 text of a file or pipe. Raises ValueError (with the path)."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {why_unreadable(path, error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8, got {error.reason} at byte {error.start}") from error


def why_unreadable(path: Path, error: OSError) -> str:
    """ "cannot be read: ...", with the owner and mode if permissions are the reason."""
    text = f"cannot be read: {error.strerror or error}"
    if error.errno not in (errno.EACCES, errno.EPERM):
        return text
    hint = (
        "make it readable (chmod a+r; a+rx for its directories), or run as its owner (--user in a container)"
    )
    return f"{text} to uid {os.geteuid()}{_owner(path)}; {hint}"


def _owner(path: Path) -> str:
    try:
        status = path.stat()
    except OSError:
        return ""  # a parent directory denies access, too
    return f", and it belongs to uid {status.st_uid} with mode {stat.S_IMODE(status.st_mode):04o}"


def _kind(path: Path) -> str:
    return "a directory" if path.is_dir() else "something else"
