"""Memory on the GPUs of this host that other processes allocated: opened by CUDA IPC handles."""

import ctypes
import functools
from typing import Any

import numpy as np
import torch

from expertd.service.memory import HANDLE_BYTES, HIDDEN, DeviceMemory, OpenCuda, Span, check_handle

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


def opener_for(index: int) -> OpenCuda:
    """The function that makes other processes' GPU memory accessible to a GPU of this process.

    It opens a handle (64 bytes) of at least `num_bytes`. The handle tells the driver which GPU has the
    memory, also one that is hidden from this process; other processes count GPUs in their own way. Another
    GPU's memory becomes accessible by peer access. The driver counts how often a handle is open.
    Raises ValueError.
    """

    def open_cuda(handle: bytes, num_bytes: int) -> DeviceMemory:
        check_handle(handle)
        driver = _driver(index)
        raw = driver.CUipcMemHandle()
        ctypes.memmove(raw.getPtr(), handle, HANDLE_BYTES)
        status, pointer = driver.cuIpcOpenMemHandle(raw, _LAZY_PEER_ACCESS)
        if status:
            expected = "a handle of another process's memory that GPU {index} can access"
            raise ValueError(f"raw_handle: expected {expected.format(index=index)}, got {status.name}")

        def close() -> None:
            _driver(index).cuIpcCloseMemHandle(pointer)

        status, base, size = driver.cuMemGetAddressRange(pointer)
        available = 0 if status else int(base) + size - int(pointer)
        if num_bytes > available:
            close()
            raise ValueError(f"byte_size: expected at most the allocation's {available}, got {num_bytes}")
        status, ordinal = driver.cuPointerGetAttribute(
            driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer
        )
        is_seen = not status and 0 <= int(ordinal) < torch.cuda.device_count()
        span = Span(int(pointer), num_bytes, int(ordinal) if is_seen else HIDDEN)
        return DeviceMemory(span, close, write=functools.partial(_write, index, span.address))

    return open_cuda


def _write(index: int, address: int, offset: int, data: memoryview) -> None:
    """Copy bytes to a GPU's memory, and wait until they are there. Raises RuntimeError if that fails."""
    driver, stream = _driver(index), _stream(index)
    source = np.frombuffer(data, np.uint8)
    for step, arguments in (
        (driver.cuMemcpyHtoDAsync, (address + offset, source.ctypes.data, len(source), stream)),
        (driver.cuStreamSynchronize, (stream,)),
    ):
        (status,) = step(*arguments)
        if status:
            raise RuntimeError(f"a copy to a region of a GPU's memory failed: {status.name}")


@functools.cache
def _stream(index: int) -> Any:
    """For copies that wait for no step: of several threads, each waits for the others', too."""
    driver = _driver(index)
    status, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    if status:
        raise RuntimeError(f"a stream for copies to regions cannot be made: {status.name}")
    return stream


def _driver(index: int) -> Any:
    """The driver's functions, with torch's context of the GPU current in this thread."""
    from cuda.bindings import driver  # not installed without a GPU
    from cuda.core import Device

    Device(index).set_current()
    return driver
