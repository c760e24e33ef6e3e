"""Launches of variants on torch's stream; tensors of a CPU go to Triton's interpreter, for tests."""

import functools
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertd.kernels.backends.streams import cuda_core, current_stream
from expertd.kernels.backends.triton.build import TritonBinary, build, function_of
from expertd.kernels.backends.triton.targets import Target
from expertd.kernels.backends.triton.variants import TritonVariant

Argument = Tensor | int | float
_INTERPRETED_SMS = 2  # programs of a grid that a GPU would size by its SMs
# cuda.core takes arguments of other sizes than a pointer's as NumPy scalars.
_SCALARS: dict[str, Any] = {"i32": np.int32, "i64": np.int64, "fp32": np.float32}


class LoadedTritonKernels:
    """The kernels of one process, each loaded on the devices where it is used."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._lock = threading.Lock()
        self._loaded: dict[tuple[int, str], tuple[Any, TritonBinary]] = {}

    def launch(
        self, variant: TritonVariant, device: torch.device, grid: tuple[int, ...], *given: Argument
    ) -> None:
        """Launch a kernel by torch's current stream, or interpret it; `given` in the order of its types."""
        if device.type == "cpu":
            function_of(variant)[grid](*given, **dict(variant.constants))
            return
        on = current_stream(device.index)
        kernel, binary = self._get(device.index, variant)
        arguments = (
            value.data_ptr() if isinstance(value, Tensor) else _SCALARS[kind](value)
            for value, (_, kind) in zip(given, variant.types, strict=True)
        )
        config = _config(grid, 32 * variant.warps, binary.shared_bytes)
        cuda_core().launch(on.stream, config, kernel, *arguments, *(0,) * binary.unused)

    def load(self, device: int, variant: TritonVariant, binary: TritonBinary) -> None:
        """Load a kernel unless it is loaded already."""
        with self._lock:
            if (device, variant.name) not in self._loaded:  # one that is may be running
                self._loaded[device, variant.name] = _load(device, variant, binary), binary

    def programs(self, variant: TritonVariant, device: torch.device, num_sms: int | None) -> int:
        """How many of a variant's CTAs num_sms SMs run at once; None: those of the device."""
        if device.type == "cpu":
            return num_sms or _INTERPRETED_SMS
        every: int = torch.cuda.get_device_properties(device).multi_processor_count
        sms = every if num_sms is None else min(num_sms, every)
        return sms * self._ctas(device.index, variant)

    def _get(self, device: int, variant: TritonVariant) -> tuple[Any, TritonBinary]:
        """The kernel on the device; on first use it is compiled (or fetched from the cache) and loaded."""
        key = device, variant.name
        if key not in self._loaded:
            self.load(device, variant, build(variant, self.target))
        return self._loaded[key]

    @functools.cache  # noqa: B019  (as long as the process)
    def _ctas(self, device: int, variant: TritonVariant) -> int:
        kernel, binary = self._get(device, variant)
        of = kernel.occupancy
        return int(of.max_active_blocks_per_multiprocessor(32 * variant.warps, binary.shared_bytes))


def _load(device: int, variant: TritonVariant, binary: TritonBinary) -> Any:
    from cuda.bindings import driver

    core = cuda_core()
    core.Device(device).set_current()  # the context that torch uses too
    kernel = core.ObjectCode.from_cubin(binary.cubin).get_kernel(variant.place[1])
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if binary.shared_bytes > 0:
        (status,) = driver.cuKernelSetAttribute(attribute, binary.shared_bytes, kernel.handle, device)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(
                f"shared memory: expected {binary.shared_bytes} bytes per CTA, got {status.name}"
            )
    return kernel


@functools.lru_cache(maxsize=4096)
def _config(grid: tuple[int, ...], threads: int, shared_bytes: int) -> Any:
    # Not programmatic: a launch begins when the preceding one has ended, since kernels do not wait for it.
    return cuda_core().LaunchConfig(grid=grid, block=threads, shmem_size=shared_bytes)
