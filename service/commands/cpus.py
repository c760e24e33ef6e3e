"""The CPUs that a server uses: what OpenMP is told before torch is imported, and what `check` says."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from expertd.cpus import cpus

if TYPE_CHECKING:
    from expertd.service.settings.model import Settings


def prepare_openmp(settings: "Settings") -> None:
    """Set OpenMP's variables for this process and those that it starts, unless the user has set them.

    It would have a thread for each CPU of the affinity mask, whatever the quota; and idle threads would spin,
    at the cost of all others. On a GPU they are left alone: steps use no OpenMP there.
    """
    found = cpus()
    if found.count < found.affinity:
        os.environ.setdefault("OMP_NUM_THREADS", str(found.count))
    if settings.backend == "reference" or not any(Path("/dev").glob("nvidia[0-9]*")):
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def check_cpus(settings: "Settings", on_gpu: bool) -> str:
    """The CPUs that were found, and the threads that compute on them; a warning if those are more."""
    found = cpus()
    if on_gpu:
        return f"{found}; kernels are compiled by {found.count} at once"
    import torch

    ranks = settings.ranks_per_node
    threads = max(1, torch.get_num_threads() // ranks)
    text = f"{found}; torch has {threads} thread{'s' * (threads > 1)}"
    text += f" in each of {ranks} ranks" if ranks > 1 else ""
    if threads * ranks > found.count:
        return f"warning: {text}, more than run at once: they wait for each other"
    return text
