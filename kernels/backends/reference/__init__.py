"""The reference backend: plain PyTorch, correct on any device and fast on a CPU."""

from collections.abc import Sequence

import torch

from expertd.kernels.backends.base import Backend
from expertd.kernels.backends.reference.backend import ReferenceBackend
from expertd.kernels.jit import Variant


def why_not(device: torch.device | None) -> str | None:
    """None: it runs everywhere."""
    return None


def create() -> Backend:
    """The backend."""
    return ReferenceBackend()


def jit_variants() -> Sequence[Variant]:
    """None."""
    return ()
