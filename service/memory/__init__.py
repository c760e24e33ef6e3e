"""Memory that the device reads and writes by address: blocks for HTTP, and callers' regions."""

from expertd.service.memory.arena import Arena, Block
from expertd.service.memory.region_uses import NoBlockError, RegionSlice, RegionUses
from expertd.service.memory.regions import Region, RegionKind, Regions
from expertd.service.memory.span import (
    HANDLE_BYTES,
    HIDDEN,
    Buffer,
    DeviceMemory,
    Mapped,
    OpenCuda,
    Register,
    SharedMemory,
    Span,
    Unregister,
    check_handle,
    host_view,
    is_for_device_alone,
    is_on_gpu,
    nothing_to_register,
)
from expertd.service.memory.system import RegionError, SystemMemory

__all__ = [
    "HANDLE_BYTES",
    "HIDDEN",
    "Arena",
    "Block",
    "Buffer",
    "DeviceMemory",
    "Mapped",
    "NoBlockError",
    "OpenCuda",
    "Region",
    "RegionError",
    "RegionKind",
    "RegionSlice",
    "RegionUses",
    "Regions",
    "Register",
    "SharedMemory",
    "Span",
    "SystemMemory",
    "Unregister",
    "check_handle",
    "host_view",
    "is_for_device_alone",
    "is_on_gpu",
    "nothing_to_register",
]
