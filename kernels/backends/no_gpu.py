"""Why PyTorch has no NVIDIA GPU here: by its build, and by what the driver says of itself."""

import ctypes

import torch


def why_no_gpu() -> str | None:
    """None if there is a CUDA device, else the reason."""
    if torch.cuda.is_available():
        return None
    driver = driver_version()
    if driver is None:
        return "no CUDA device"
    if torch.version.cuda is None:
        return "a PyTorch that is built without CUDA"
    # Within a major version, older drivers do.
    if driver[0] < int(torch.version.cuda.partition(".")[0]):
        return f"a driver for CUDA {driver[0]}.{driver[1]} instead of {torch.version.cuda} or newer"
    return "no CUDA device"


def driver_version() -> tuple[int, int] | None:
    """The newest CUDA that the NVIDIA driver supports; None if there is no driver. Makes no context."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else (version.value // 1000, version.value % 1000 // 10)
