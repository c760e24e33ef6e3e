"""Compiled kernels loaded on devices, and the stream that torch is on, as cuda.core wants them."""

import functools
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import Device, ObjectCode, Stream

from kernels import jit

OnStream = tuple[int, int, Stream]
"""Where to launch: device, handle of the stream, and cuda.core's stream."""


class LoadedKernels:
    """The kernels of one process, by device and source."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[int, str], Any] = {}

    def loaded(self, device: int, source: jit.Source) -> bool:
        """Whether `get` finds it there."""
        return (device, source.name) in self._kernels

    def get(self, device: int, source: jit.Source) -> Any:
        """The kernel, which must have been loaded."""
        return self._kernels[device, source.name]

    def load(self, device: int, source: jit.Source, binary: jit.Binary, shared_bytes: int = 0) -> None:
        """Load it, with leave to use so many bytes of dynamic shared memory where they are many."""
        Device(device).set_current()  # the context that torch uses too
        kernel = ObjectCode.from_cubin(binary.cubin).get_kernel(source.entry)
        if shared_bytes > 0:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (status,) = driver.cuKernelSetAttribute(attribute, shared_bytes, kernel.handle, device)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"expected {shared_bytes} bytes of shared memory, got {status.name}")
        self._kernels[device, source.name] = kernel


def current_stream(device: int) -> OnStream:
    """Torch's current stream."""
    handle = torch._C._cuda_getCurrentRawStream(device)  # what torch.cuda.current_stream makes objects of
    return device, handle, _stream(device, handle)


@functools.lru_cache(maxsize=4096)
def _stream(device: int, handle: int) -> Stream:
    """Kept, for from_handle defines a class each time; the default stream's handle is the same everywhere."""
    return Stream.from_handle(handle)
