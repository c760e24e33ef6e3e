"""How much of the host's memory is free for this process, and what it frees."""

import ctypes
import re
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")  # of this container


def free_host_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = _CGROUP) -> int:
    """Bytes that can be allocated without swapping, within the limit of the container."""
    found = re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(), re.M)
    free = int(found[1]) * 1024 if found else 0
    try:
        most = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        files = re.search(r"^inactive_file (\d+)", (cgroup / "memory.stat").read_text(), re.M)
    except (OSError, ValueError):  # another version of cgroups, or none
        return free
    if not most.isdigit():
        return free
    return min(free, max(0, int(most) - used + (int(files[1]) if files else 0)))


def give_back_freed() -> None:
    """Return freed memory to the system: glibc keeps blocks of up to 32 MiB for itself."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
