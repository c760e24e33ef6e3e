"""How much of the host's memory is free for this process."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_CGROUP = Path("/sys/fs/cgroup")  # of this container
_OWN = Path("/proc/self/cgroup")
# The limit, what is used, and of that, files that can be dropped.
_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_VERSION_2 = ("memory.max", "memory.current", "inactive_file")


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP, own: Path = _OWN) -> int:
    """Bytes that can be allocated without swapping, within the limits of the container, or of the service."""
    found = re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(), re.M)
    return min([int(found[1]) * 1024 if found else 0, *_rooms(cgroup, own)])


def _rooms(cgroup: Path, own: Path) -> Iterator[int]:
    """The bytes left in each limit that holds for this process, with cgroups of version 2 or 1."""
    if not own.exists():
        return
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = (cgroup / "memory", _VERSION_1) if controllers else (cgroup, _VERSION_2)
        inner = PurePosixPath(path.lstrip("/"))
        # In a container the root is its own, and the path, which is the host's, may not be there.
        for each in (inner, *inner.parents):
            if (room := _room(root / each, *names)) is not None:
                yield room


def _room(folder: Path, limit: str, usage: str, droppable: str) -> int | None:
    """The bytes left in a cgroup; None if it has no limit."""
    try:
        most = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        files = re.search(rf"^{droppable} (\d+)", (folder / "memory.stat").read_text(), re.M)
    except (OSError, ValueError):
        return None
    if not most.isdigit():
        return None
    return max(0, int(most) - used + (int(files[1]) if files else 0))
