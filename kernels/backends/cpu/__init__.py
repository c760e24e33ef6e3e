"""The backend of CPUs: its kernel is compiled by LLVM for the instructions that the CPU has."""

import torch

from expertd.kernels.backends.base import Backend


def why_not(device: torch.device | None) -> str | None:
    """Why it cannot run on `device`; None if it can."""
    if device is not None and device.type != "cpu":
        return f"needs a CPU's tensors, got {device}"
    try:
        from expertd.kernels.backends.cpu.program import program

        program()
    except (ImportError, OSError) as error:
        return f"needs llvmlite (expertd[cpu]) and torch's OpenMP: {error}"
    return None


def create() -> Backend:
    """The backend."""
    from expertd.kernels.backends.cpu.backend import CpuBackend

    return CpuBackend()
