"""Whether NIXL can be used here."""

from importlib.util import find_spec
from pathlib import Path

_ADAPTERS = Path("/sys/class/infiniband")  # those for RoCE, too


def is_installed() -> bool:
    """Whether its package is there."""
    return find_spec("nixl_cu13") is not None


def has_rdma() -> bool:
    """Whether its package and an adapter for RDMA are there."""
    return is_installed() and _ADAPTERS.is_dir() and any(_ADAPTERS.iterdir())
