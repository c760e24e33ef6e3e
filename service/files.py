"""Reads users' files; if one cannot be read, the error is one sentence."""

import errno
import os
import stat
from pathlib import Path


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
