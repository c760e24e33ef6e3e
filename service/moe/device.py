"""What the service reports of the device that it computes on."""

import platform

import torch


def device_name(device: torch.device) -> str:
    """The device's name as its maker gives it, or the machine's architecture for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """(used, total) bytes of a GPU's memory, by every process; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total
