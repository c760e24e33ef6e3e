"""Memory of a GPU that two processes have, by CUDA's virtual memory management.

Unlike memory with a CUDA IPC handle, it goes between containers, as a descriptor, and stays when the process
that made it ends: the driver frees it with the last mapping and descriptor.
"""

from typing import Any


class SharedGpuMemory:
    """See `SharedMemory`. Raises RuntimeError, with the function of the driver that failed.

    descriptor  of what another process has made; None: new memory, of zeros
    """

    def __init__(self, device: int, num_bytes: int, descriptor: int | None = None) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        properties = driver.CUmemAllocationProp()
        properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._kind
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = device
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = self._do("cuMemGetAllocationGranularity", properties, minimum)
        self.num_bytes = -(-num_bytes // unit) * unit
        if descriptor is None:
            self._handle = self._do("cuMemCreate", self.num_bytes, properties, 0)
        else:
            self._handle = self._do("cuMemImportFromShareableHandle", descriptor, self._kind)
        self._place: Any = None
        self._is_mapped = False
        try:
            self._place = self._do("cuMemAddressReserve", self.num_bytes, 0, 0, 0)
            self._do("cuMemMap", self._place, self.num_bytes, 0, self._handle, 0)
            self._is_mapped = True
            access = driver.CUmemAccessDesc()
            access.location = properties.location
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._do("cuMemSetAccess", self._place, self.num_bytes, [access], 1)
            if descriptor is None:
                self._do("cuMemsetD8", self._place, 0, self.num_bytes)
                self._do("cuStreamSynchronize", 0)  # it may be unmapped from now on
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> int:
        return int(self._place)

    def descriptor(self) -> int:
        """See `SharedMemory.descriptor`."""
        return int(self._do("cuMemExportToShareableHandle", self._handle, self._kind, 0))

    def read(self, offset: int, num_bytes: int) -> bytes:
        """See `SharedMemory.read`."""
        read = bytearray(num_bytes)
        self._do("cuMemcpyDtoH", read, self.address + offset, num_bytes)
        return bytes(read)

    def close(self) -> None:
        """See `SharedMemory.close`."""
        if self._is_mapped:
            self._do("cuMemUnmap", self._place, self.num_bytes)
        if self._place is not None:
            self._do("cuMemAddressFree", self._place, self.num_bytes)
        self._do("cuMemRelease", self._handle)
        self._is_mapped, self._place = False, None

    def _do(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name}: expected CUDA_SUCCESS, got {status.name}")
        return values[0] if values else None
