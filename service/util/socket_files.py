"""The files of Unix sockets on which servers listen."""

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

_LOCK_SECONDS = 2.0


class SocketFile:
    """The file of a socket that has just been bound to `path`."""

    def __init__(self, path: Path) -> None:
        self._path: Path | None = path
        self._identity = _identity(path)

    def remove(self) -> None:
        """Remove it, unless it is gone, or another server has replaced it. Do so before the socket closes."""
        path, self._path = self._path, None
        with suppress(OSError):
            if path is not None and _identity(path) == self._identity:
                path.unlink()


def _identity(path: Path) -> tuple[int, int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino, status.st_mtime_ns  # a new file may have the inode of a removed one


def listen_at(path: Path, backlog: int, group: int | None = None) -> tuple[socket.socket, SocketFile]:
    """A socket that listens at `path`, and its file: for this user only, or for the users of a group, too.

    Raises OSError, with a sentence.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    file: SocketFile | None = None
    why: str | None = None
    try:
        with _free_path(path) as why:
            if why is not None:
                raise FileExistsError
            made.bind(str(path))
            file = SocketFile(path)
            path.chmod(0o600)  # before it listens, so that nobody else can connect
            if group is not None:
                why = f"expected a group of uid {os.geteuid()}, to give it to, got {group}"
                os.chown(path, -1, group)
                why = None
                path.chmod(0o660)
            made.listen(backlog)
    except OSError as error:
        if file is not None:
            file.remove()
        made.close()
        text = why or f"expected a path for a new socket, got {path}: {error.strerror or error}"
        raise OSError(text) from error
    return made, file


@contextmanager
def _free_path(path: Path) -> Iterator[str | None]:
    """Remove a socket at `path` on which nobody listens; yields why the path is not free, None: it is.

    Until the end, no other server looks there: two that find a dead socket could remove each other's new one.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # some file systems have no locks
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, folder)
            _lock(folder)
        yield _why_taken(path)


def _lock(folder: int) -> None:
    until = time.monotonic() + _LOCK_SECONDS
    while time.monotonic() < until:
        with suppress(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.01)


def _why_taken(path: Path) -> str | None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if not stat.S_ISSOCK(mode):
        return f"expected a free path or a socket, got {path}, which is another file"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return None
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return None
        except TimeoutError:
            pass  # its backlog is full: it is alive
    return f"expected a free path, got {path}, on which another server listens"
