"""Whether NIXL can be used here."""

from importlib.util import find_spec


def is_installed() -> bool:
    """Whether its package is there."""
    return find_spec("nixl_cu13") is not None
