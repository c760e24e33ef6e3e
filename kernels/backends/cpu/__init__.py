"""The backend of CPUs: its kernel is compiled by LLVM for the instructions that the CPU has."""

import torch

from expertd.kernels.backends.base import Backend


def why_not(device: torch.device | None) -> str | None:
    """None if this backend can run on `device` (None: the CPU), else the reason."""
    if device is not None and device.type != "cpu":
        return f"a {device.type} device"
    try:
        from expertd.kernels.backends.cpu.program import instructions_here, openmp

        instructions_here()
        openmp()
    except ImportError:
        return "no llvmlite installed (expertd[cpu])"
    except OSError as error:
        return f"no OpenMP of torch's: {error}"
    return None


def why_slower() -> str | None:
    """Why `reference` is the faster one here; None if this backend is, or if it cannot run."""
    from expertd.kernels.backends.cpu.program import instructions_here

    return None if instructions_here().has_bf16 else "a CPU without AVX512-BF16"


def create() -> Backend:
    """The backend."""
    from expertd.kernels.backends.cpu.backend import CpuBackend

    return CpuBackend()
