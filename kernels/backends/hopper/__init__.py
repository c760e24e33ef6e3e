"""The Hopper backend: kernels compiled just in time, their variants and their launches."""

import torch

from expertd.kernels.backends.base import Backend
from expertd.kernels.backends.listing import KernelList
from expertd.kernels.backends.no_gpu import why_no_gpu
from expertd.kernels.jit import ARCHITECTURE


def why_not(device: torch.device | None) -> str | None:
    """None if this backend can run on `device` (None: the current CUDA device), else the reason."""
    if device is not None and device.type != "cuda":
        return f"a {device.type} device"
    if (reason := why_no_gpu()) is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"a GPU of compute capability {capability[0]}.{capability[1]} instead of 9.0"
    try:
        import cuda.core  # noqa: F401
    except ImportError as error:
        return f"cuda.core not importable ({error})"
    return None


def create() -> Backend:
    """The backend; needs cuda.core."""
    from expertd.kernels.backends.hopper.backend import HopperBackend

    return HopperBackend()


def architectures() -> tuple[str, ...]:
    """What kernels are compiled for."""
    return (ARCHITECTURE,)


def kernel_list(architecture: str) -> KernelList:
    """All kernels; needs no GPU."""
    from expertd.kernels.backends.hopper.listing import HopperKernels

    return HopperKernels()
