"""The name and memory of the device, for logs and metrics."""

import platform

import torch


def device_name(device: torch.device) -> str:
    """The GPU's name, or the machine's architecture for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """(used, total) bytes of a GPU's memory, of all processes; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total
