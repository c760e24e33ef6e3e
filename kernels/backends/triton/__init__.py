"""The Triton backend: portable kernels for NVIDIA GPUs from Ampere on, their variants and their launches."""

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from expertd.kernels.backends.base import Backend
from expertd.kernels.backends.no_gpu import why_no_gpu
from expertd.kernels.backends.triton.targets import target_of
from expertd.kernels.jit import Variant


def why_not(device: torch.device | None) -> str | None:
    """None if this backend can run on `device` (None: the current CUDA device), else the reason."""
    if device is not None and device.type != "cuda":
        return f"a {device.type} device"
    if (reason := why_no_gpu()) is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if target_of(capability) is None:
        return f"a GPU of compute capability {capability[0]}.{capability[1]} instead of 8.x, 9.0 or 12.x"
    for package in ("triton", "cuda.core"):
        try:
            missing = find_spec(package) is None
        except ImportError:
            missing = True
        if missing:
            return f"no {package} installed"
    return None


def create() -> Backend:
    """The backend; needs Triton and cuda.core."""
    from expertd.kernels.backends.triton.backend import TritonBackend

    return TritonBackend()


def jit_variants() -> Sequence[Variant]:
    """None: those that NVRTC compiles."""
    return ()
