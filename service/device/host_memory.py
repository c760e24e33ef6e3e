"""How much of the host's memory is free for this process."""

import re
from collections.abc import Iterator
from pathlib import Path

from expertd.cgroups import PROC, groups

# The limit, what is used, and of that, files that can be dropped; by the version of cgroups.
_NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), proc: Path = PROC) -> int:
    """Bytes that can be allocated without swapping, within the limits of the container, or of the service."""
    found = re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(), re.M)
    return min([int(found[1]) * 1024 if found else 0, *_rooms(proc)])


def _rooms(proc: Path) -> Iterator[int]:
    """The bytes left in each limit that holds for this process."""
    for version, folder in groups("memory", proc):
        if (room := _room(folder, *_NAMES[version])) is not None:
            yield room


def _room(folder: Path, limit: str, usage: str, droppable: str) -> int | None:
    """The bytes left in a cgroup; None if it has no limit."""
    try:
        maximum = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        files = re.search(rf"^{droppable} (\d+)", (folder / "memory.stat").read_text(), re.M)
    except (OSError, ValueError):
        return None
    if not maximum.isdigit():
        return None
    return max(0, int(maximum) - used + (int(files[1]) if files else 0))
