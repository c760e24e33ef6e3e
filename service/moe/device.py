"""The device: its name and memory, for logs and metrics, and its access to host memory."""

import platform

import torch

from expertd.service.memory import Mapped, Register, Unregister, nothing_to_register
from expertd.service.moe.capture import synchronize
from expertd.service.moe.host_memory import free_host_bytes

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister: in every context, and at the same address on the GPU


def device_name(device: torch.device) -> str:
    """The GPU's name, or the machine's architecture for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """(used, total) bytes of a GPU's memory, of all processes; None for a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free, total


def failure_of(device: torch.device) -> str | None:
    """Why a GPU computes nothing any more in this process, as after a kernel that faulted; None if it does.

    Waits for what runs there: ask after a step has failed.
    """
    if device.type != "cuda":
        return None
    try:
        synchronize(device)
    except RuntimeError as error:  # it is said again by every call from then on
        return str(error).partition("\n")[0]
    return None


def gpu_uuids(device: torch.device) -> tuple[str, ...]:
    """The UUID of a GPU, as the driver's tools know it; () for a CPU."""
    if device.type != "cuda":
        return ()
    return (f"GPU-{torch.cuda.get_device_properties(device).uuid}",)


def prepare_thread(device: torch.device) -> None:
    """Make the device's context the current one, for calls that do not go through torch."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.synchronize()


def free_device_bytes(device: torch.device) -> int:
    """Bytes that can be allocated: of a GPU's memory, or of the host's within the container's limit."""
    memory = device_memory(device)
    if memory is None:
        return free_host_bytes()
    used, total = memory
    return total - used


def register_for(device: torch.device) -> Register:
    """The function that makes host memory accessible to `device`."""
    if device.type != "cuda":
        return nothing_to_register

    def register(memory: Mapped) -> Unregister:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            status = runtime.cudaHostRegister(memory.address, memory.num_bytes, _PORTABLE_AND_MAPPED)
        if int(status):
            expected = f"{memory.num_bytes} bytes to be registered"
            raise RuntimeError(f"cudaHostRegister: expected {expected}, got {status}")
        return lambda: runtime.cudaHostUnregister(memory.address)

    return register
