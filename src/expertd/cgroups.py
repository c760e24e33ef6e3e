"""The control groups of this process, by which a container or a service limits it."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc/self")
# proc(5): after three numbers, the root and the place of a mount; its type, source and options come last.
_MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .* - (cgroup2?) \S* (\S+)$", re.M)


def groups(controller: str, proc: Path = PROC) -> Iterator[tuple[int, Path]]:
    """The version (2 or 1) and folder of each group whose limits by `controller` ("cpu", "memory") hold here.

    They are this process's own and those above it, as far as they can be seen: a container often sees its
    own as the root. A folder may be missing. There are none on a system without control groups.
    """
    try:
        own, mounts = (proc / "cgroup").read_text(), (proc / "mountinfo").read_text()
    except OSError:
        return
    for controllers, path in re.findall(r"^\d+:(.*?):(/.*)$", own, re.M):
        if controllers and controller not in controllers.split(","):
            continue
        for root, folder, kind, options in _MOUNT.findall(mounts):
            if not controllers and kind == "cgroup2":
                version = 2
            elif controllers and kind == "cgroup" and controller in options.split(","):
                version = 1
            else:
                continue
            inner = _inner(PurePosixPath(path), PurePosixPath(_unescaped(root)))
            yield from ((version, Path(_unescaped(folder), each)) for each in (inner, *inner.parents))


def _inner(path: PurePosixPath, root: PurePosixPath) -> PurePosixPath:
    """The group at `path`, seen from the mounted one; that one itself if the process is outside of it."""
    if ".." in path.parts or not path.is_relative_to(root):
        return PurePosixPath()
    return path.relative_to(root)


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
