"""Processes that a process has started, by what they run."""

from pathlib import Path


def children_of(process: int | None, module: str) -> list[int]:
    """The ids of the children of a process (None: this one) whose command lines have `module`, in order."""
    task = Path(f"/proc/{process or 'self'}/task")
    children = [int(pid) for file in task.glob("*/children") for pid in _read(file).split()]
    return sorted(pid for pid in children if module.encode() in command_of(pid))


def command_of(process: int) -> bytes:
    """The command line of a process; empty if it has ended."""
    return _read(Path(f"/proc/{process}/cmdline"))


def _read(file: Path) -> bytes:
    """What a file of /proc holds; nothing if its process or thread has ended."""
    try:
        return file.read_bytes()
    except OSError:
        return b""
