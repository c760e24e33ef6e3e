"""The reference backend: plain PyTorch, correct on any device and fast on a CPU."""

import torch

from expertd.kernels.backends.base import Backend
from expertd.kernels.backends.reference.backend import ReferenceBackend


def why_not(device: torch.device | None) -> str | None:
    """None: it runs everywhere."""
    return None


def create() -> Backend:
    """The backend."""
    return ReferenceBackend()
