"""The CPUs that a server uses: sets OpenMP's variables before torch is imported, and reports to `check`."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from expertd.backends import BACKENDS, Capabilities
from expertd.cpus import cpus

if TYPE_CHECKING:
    from expertd.service.settings.model import Settings

_THREADS = re.compile(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*")  # one number for each level of nesting


def prepare_openmp(settings: "Settings") -> None:
    """Set OpenMP's variables for this process and those that it starts, unless the user has set them.

    An empty value, or a number of threads that is none, which OpenMP would ignore, counts as not set.

    It would have a thread for each CPU of the affinity mask, whatever the quota; and idle threads would spin,
    at the cost of all others. On a GPU they are left alone: steps use no OpenMP there.
    """
    found = cpus()
    if found.count < found.affinity and not _THREADS.fullmatch(os.environ.get("OMP_NUM_THREADS", "")):
        os.environ["OMP_NUM_THREADS"] = str(found.count)
    given = BACKENDS.get(settings.backend)  # None: "auto"
    if (given is not None and not given.on_gpu) or not any(Path("/dev").glob("nvidia[0-9]*")):
        os.environ["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY") or "passive"


def check_cpus(settings: "Settings", capabilities: Capabilities) -> str:
    """The CPUs that were found, and the threads that compute on them; a warning if those are more."""
    found = cpus()
    if capabilities.on_gpu:
        return f"{found}; kernels are compiled by {found.count} at once"
    import torch

    ranks = settings.ranks_per_node
    threads = max(1, torch.get_num_threads() // ranks)
    text = f"{found}; torch has {threads} thread{'s' * (threads > 1)}"
    text += f" in each of {ranks} ranks" if ranks > 1 else ""
    if threads * ranks > found.count:
        given = os.environ.get("OMP_NUM_THREADS")
        why = f" by OMP_NUM_THREADS={given}" if given else ""
        return f"warning: {text}{why}, more than the {found.count} that may run at once"
    return text
