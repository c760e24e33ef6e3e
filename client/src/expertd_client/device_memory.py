"""Memory of a GPU that a server may use too: allocated and exported through the CUDA driver.

torch's own allocator cannot be asked for memory with a handle of its own, so this takes it from the driver,
in torch's context of the GPU, and makes it a tensor.
"""

import base64
import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from expertd_client.errors import TransportUnavailableError

if TYPE_CHECKING:
    import torch

HANDLE_BYTES = 64
# A handle gives access to the whole allocation, which the driver rounds up: no other one may lie in it.
_UNIT = 2 << 20


class DeviceMemoryError(TransportUnavailableError):
    """The driver gives no memory that can be shared."""


class GpuAllocation:
    """`num_bytes` on the GPU `index`, freed by `close`, or when this object and tensors of it are gone.

    Raises DeviceMemoryError if the driver refuses.
    """

    def __init__(self, index: int, num_bytes: int) -> None:
        self.index, self.num_bytes = index, num_bytes
        self._pointer = ctypes.c_uint64()
        handle = (ctypes.c_char * HANDLE_BYTES)()
        with in_context(index):
            call(
                "cuMemAlloc_v2", ctypes.byref(self._pointer), ctypes.c_size_t(-(-num_bytes // _UNIT) * _UNIT)
            )
            call("cuIpcGetMemHandle", ctypes.byref(handle), self._pointer)
        self.handle = bytes(handle.raw)
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (self._pointer.value, False), "version": 3
        }  # fmt: skip

    def tensor(self) -> "torch.Tensor":
        """Its bytes, uint8 [num_bytes]; torch keeps this object for as long as it needs it."""
        import torch

        return torch.as_tensor(self, device=f"cuda:{self.index}")

    def described(self) -> dict[str, Any]:
        """As the protocol has it."""
        b64 = base64.b64encode(self.handle).decode()
        return {"raw_handle": {"b64": b64}, "device_id": self.index, "byte_size": self.num_bytes}

    def close(self) -> None:
        """Free it, for which the driver waits for the GPU; no tensor of it is used, or will be."""
        if self._pointer.value:
            with in_context(self.index):
                call("cuMemFree_v2", self._pointer)
            self._pointer.value = 0

    def __del__(self) -> None:
        with suppress(DeviceMemoryError, AttributeError, TypeError):  # the process ends, its memory with it
            self.close()


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProp(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handle_types", ctypes.c_int), ("location", _Location),
        ("windows", ctypes.c_void_p), ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _AccessDesc(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_PINNED, _DESCRIPTOR, _ON_DEVICE, _MINIMUM, _READ_WRITE = 1, 1, 1, 0, 3  # the driver's numbers


class SharedDeviceMemory:
    """`num_bytes` that another process has, too, where GPU `index` reads and writes them.

    Unlike DeviceMemory, it goes as a descriptor, between containers, too, and lives as long as one of the
    processes has it. descriptor: of what the other one has made; None: new memory of this GPU, of zeros.

    Raises DeviceMemoryError if the driver refuses.
    """

    def __init__(self, index: int, num_bytes: int, descriptor: int | None = None) -> None:
        self._index = index
        self._pointer, self._handle = ctypes.c_uint64(), ctypes.c_uint64()
        where, unit = _Location(_ON_DEVICE, index), ctypes.c_size_t()
        properties = _AllocationProp(_PINNED, _DESCRIPTOR, where)
        with in_context(index):
            call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), _MINIMUM)
            self._size = size = ctypes.c_size_t(-(-num_bytes // unit.value) * unit.value)
            nothing = ctypes.c_uint64()
            if descriptor is None:
                call("cuMemCreate", ctypes.byref(self._handle), size, ctypes.byref(properties), nothing)
            else:
                handle = ctypes.byref(self._handle)
                call("cuMemImportFromShareableHandle", handle, ctypes.c_void_p(descriptor), _DESCRIPTOR)
            none = ctypes.c_size_t()
            call("cuMemAddressReserve", ctypes.byref(self._pointer), size, none, nothing, nothing)
            call("cuMemMap", self._pointer, size, none, self._handle, nothing)
            access = _AccessDesc(where, _READ_WRITE)
            call("cuMemSetAccess", self._pointer, size, ctypes.byref(access), ctypes.c_size_t(1))
            if descriptor is None:
                call("cuMemsetD8_v2", self._pointer, ctypes.c_ubyte(0), size)
                call("cuStreamSynchronize", nothing)  # the other process may read it from now on

    @property
    def address(self) -> int:
        return self._pointer.value

    def descriptor(self) -> int:
        """A new descriptor, for the other process, which belongs to the caller."""
        descriptor = ctypes.c_int()
        nothing = ctypes.c_uint64()
        call("cuMemExportToShareableHandle", ctypes.byref(descriptor), self._handle, _DESCRIPTOR, nothing)
        return descriptor.value

    def close(self) -> None:
        """Have it no more; nothing uses it, or will."""
        with in_context(self._index):
            call("cuMemUnmap", self._pointer, self._size)
            call("cuMemAddressFree", self._pointer, self._size)
            call("cuMemRelease", self._handle)


@lru_cache(maxsize=1)
def get_driver() -> Any:
    """libcuda. Raises DeviceMemoryError."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceMemoryError(f"CUDA driver: expected libcuda.so.1, got {error}") from error
    # A handle is passed by value elsewhere; everything here takes pointers, sizes and numbers of 64 bits.
    driver.cuCtxPushCurrent_v2.argtypes = [ctypes.c_void_p]
    driver.cuCtxPopCurrent_v2.argtypes = [ctypes.c_void_p]
    return driver


@lru_cache(maxsize=64)
def primary_context(index: int) -> ctypes.c_void_p:
    """torch's context of a GPU, kept for the rest of the process."""
    context, device = ctypes.c_void_p(), ctypes.c_int()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return context


@contextmanager
def in_context(index: int) -> Iterator[None]:
    """torch's context current in this thread."""
    call("cuCtxPushCurrent_v2", primary_context(index))
    try:
        yield
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises DeviceMemoryError."""
    status = getattr(get_driver(), name)(*arguments)
    if status:
        raise DeviceMemoryError(f"{name}: expected CUDA_SUCCESS, got status {status}")
