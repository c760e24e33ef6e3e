"""Compiled kernels loaded on devices, the stream that torch is on, and rows, as cuda.core wants them."""

import functools
from typing import Any

import torch
from cuda.bindings import driver
from cuda.core import Device, ObjectCode, Stream, TensorMapDescriptorOptions
from cuda.core._tensor_map import TensorMapL2Promotion, TensorMapSwizzle  # cuda.core names them nowhere else
from cuda.core.utils import StridedMemoryView

from expertd.kernels import jit
from expertd.kernels.backends.hopper.tensor_maps import Rows

_BOX_BYTES = 128  # of a row, as wide as the swizzle

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
            of = driver.CUfunction_attribute
            for attribute, value in (
                (of.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
                (of.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),  # per cent
            ):
                (status,) = driver.cuKernelSetAttribute(attribute, value, kernel.handle, device)
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


def describe_rows(
    rows: Rows, box_rows: int, l2_promotion: TensorMapL2Promotion = TensorMapL2Promotion.L2_256B
) -> Any:
    """The TMA descriptor of rows, which come and go box_rows x 128 bytes at a time."""
    view = StridedMemoryView.from_cuda_array_interface(rows, stream_ptr=-1)
    return view.as_tensor_map(options=_options(box_rows, _BOX_BYTES // rows.itemsize, l2_promotion))


@functools.cache
def _options(rows: int, columns: int, l2_promotion: TensorMapL2Promotion) -> TensorMapDescriptorOptions:
    return TensorMapDescriptorOptions(
        (rows, columns), swizzle=TensorMapSwizzle.SWIZZLE_128B, l2_promotion=l2_promotion
    )
