"""How many CPUs this process may use at once."""

import os
from dataclasses import dataclass
from pathlib import Path

from expertd.cgroups import PROC, groups


@dataclass(frozen=True)
class Cpus:
    """CPUs of the affinity mask, and of the least quota that a control group sets; None: no quota."""

    affinity: int
    quota: float | None

    @property
    def count(self) -> int:
        """Threads that may compute at the same time without being stopped: at least 1.

        A quota is rounded down. One more thread would use it up before the period ends, and then all wait.
        """
        return max(1, self.affinity if self.quota is None else min(self.affinity, int(self.quota)))

    def __str__(self) -> str:
        quota = "no quota" if self.quota is None else f"{self.quota:.3g} by quota"
        return f"{self.affinity} by affinity, {quota}"


def cpus(proc: Path = PROC) -> Cpus:
    """The CPUs that this process may use."""
    quotas = [quota for group in groups("cpu", proc) if (quota := _quota(*group)) is not None]
    return Cpus(len(os.sched_getaffinity(0)), min(quotas, default=None))


def _quota(version: int, folder: Path) -> float | None:
    """The CPUs that a group may use; None without a quota, or one that cannot be read."""
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        found = int(quota) / int(period)  # "max", or -1: none
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return found if found > 0 else None
