"""Control groups that are files of a test."""

from collections.abc import Mapping, Sequence
from pathlib import Path

V2 = ("cgroup2", "rw,nsdelegate")


def fake_groups(
    directory: Path, own: str, mounts: Sequence[tuple[str, str, tuple[str, str]]], files: Mapping[str, str]
) -> Path:
    """The folder that stands for /proc/self, of a process whose /proc/self/cgroup is `own`.

    mounts  the root, the place in `directory`, and the file system's type and options
    files   what is in `directory`
    """
    for name, text in files.items():
        (path := directory / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    lines = ["22 1 0:21 / /proc rw,nosuid - proc proc rw\n"]
    for number, (root, place, (kind, options)) in enumerate(mounts):
        where = f"{directory / place}".replace(" ", r"\040")
        lines.append(f"{30 + number} 23 0:{28 + number} {root} {where} rw shared:9 - {kind} none {options}\n")
    proc = directory / "proc-self"
    proc.mkdir(exist_ok=True)
    (proc / "cgroup").write_text(own)
    (proc / "mountinfo").write_text("".join(lines))
    return proc
