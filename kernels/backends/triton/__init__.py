"""The Triton backend: portable kernels for NVIDIA GPUs from Ampere on, their variants and their launches."""

from importlib.util import find_spec

import torch

from expertd.kernels.backends.base import Backend
from expertd.kernels.backends.listing import KernelList
from expertd.kernels.backends.no_gpu import why_no_gpu
from expertd.kernels.backends.triton.targets import TARGETS, Target, target_of
from expertd.kernels.jit import CompilerMissingError


def why_not(device: torch.device | None) -> str | None:
    """None if this backend can run on `device` (None: the current CUDA device), else the reason."""
    if device is not None and device.type != "cuda":
        return f"a {device.type} device"
    if (reason := why_no_gpu()) is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    target = target_of(capability)
    if target is None:
        return f"a GPU of compute capability {capability[0]}.{capability[1]} instead of 8.x, 9.0 or 12.x"
    if not _is_installed("cuda.core"):
        return "no cuda.core installed"
    if not _is_installed("triton") and not _is_built(target):
        return "no triton installed"
    return None


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


def _is_built(target: Target) -> bool:
    """Whether all kernels are there, so that nothing needs to be compiled."""
    from expertd.kernels.backends.triton.build import find
    from expertd.kernels.backends.triton.variants import variants_for

    try:
        return all(find(variant, target) is not None for variant in variants_for(target))
    except CompilerMissingError:  # nor is known which Triton's they would be
        return False


def create() -> Backend:
    """The backend; needs Triton and cuda.core."""
    from expertd.kernels.backends.triton.backend import TritonBackend

    return TritonBackend()


def architectures() -> tuple[str, ...]:
    """What kernels are compiled for, that of the current GPU first."""
    here = target_of(torch.cuda.get_device_capability()) if torch.cuda.is_available() else None
    return tuple(f"sm_{each.capability}" for each in sorted(TARGETS.values(), key=lambda each: each != here))


def kernel_list(architecture: str) -> KernelList:
    """All kernels for one of the architectures; needs no GPU."""
    from expertd.kernels.backends.triton.listing import TritonKernels

    return TritonKernels(TARGETS[int(architecture.removeprefix("sm_"))])
