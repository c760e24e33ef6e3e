"""The device a backend computes on, and what the service reports of it."""

import platform

import torch

from expertd.kernels import Backend


def device_of(backend: Backend) -> torch.device:
    """The device that tensors of `backend` belong on: the first GPU for "hopper", else the CPU."""
    return torch.device("cuda", 0) if backend.name == "hopper" else torch.device("cpu")


def device_name(device: torch.device) -> str:
    """The device's name as its maker gives it, or the machine's architecture for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """(used, total) bytes of a GPU's memory, by every process; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total
