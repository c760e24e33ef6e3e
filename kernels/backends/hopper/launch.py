"""Shared by all launches: kernels loaded on devices, the configuration of a grid."""

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertd.kernels import jit
from expertd.kernels.backends.streams import OnStream, cuda_core
from expertd.kernels.jit import Variant
from expertd.limits import MAX_EXPERTS, MAX_GROUPS

_DATATYPES = {torch.bfloat16: "BF16", torch.float16: "FP16", torch.float32: "FP32"}


class Grid(NamedTuple):
    """The number of clusters of a launch, the CTAs per cluster, and the dynamic shared memory per CTA."""

    clusters: int
    cluster: int = 1
    shared_bytes: int = 0


class PackedLaunch:
    """Launches of one kernel in one grid, its only parameter a struct; cuda.core passes none by value."""

    def __init__(self, kernel: Any, variant: Variant, grid: Grid) -> None:
        from cuda.bindings import driver

        self._name = variant.source.name
        self._function = driver.CUfunction(int(kernel.handle))
        self._launch = driver.cuLaunchKernelEx
        self._config = functools.cache(functools.partial(_native_config, grid, variant.threads))

    def __call__(self, stream: int, parameters: bytes) -> None:
        """Launch it on the stream with this handle; the driver copies the parameters."""
        address = ctypes.c_char_p(parameters)
        (status,) = self._launch(self._config(stream), self._function, ctypes.addressof(address), 0)
        if status != 0:
            raise RuntimeError(f"{self._name}: expected to be launched, got {status.name}")


def no_shared_bytes(num_groups: int) -> int:
    """For kernels without dynamic shared memory."""
    return 0


def named_source(stem: str, suffix: str = "", **defines: object) -> jit.Source:
    """The source of csrc/<stem>.cu, whose entry has the same name; the suffix distinguishes its variants."""
    name = f"{stem}_{suffix}" if suffix else stem
    return jit.Source(name, f"{stem}.cu", stem, tuple((key, str(value)) for key, value in defines.items()))


def multiprocessors(device: int, num_sms: int | None) -> int:
    """The SMs of a launch that is limited to `num_sms`."""
    every: int = torch.cuda.get_device_properties(device).multi_processor_count
    return every if num_sms is None else min(num_sms, every)


def variants_by_dtype(
    stem: str,
    threads: int,
    shared_bytes: Callable[[int], int] = no_shared_bytes,
    prefix: str = "",
    **defines: object,
) -> dict[torch.dtype, Variant]:
    """The variants of csrc/<stem>.cu, which has one per floating-point type; others have other prefixes."""

    def variant(name: str) -> Variant:
        source = named_source(stem, prefix + name.lower(), DATATYPE=name, **defines)
        return Variant(source, threads, shared_bytes)

    return {dtype: variant(name) for dtype, name in _DATATYPES.items()}


class Kernels:
    """The kernels of one process, each loaded on the devices where it is used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[tuple[int, str], Any] = {}
        self._ctas_per_sm: dict[tuple[int, str, int], int] = {}
        self._has_room: dict[tuple[OnStream, str, Grid], bool] = {}

    def get(self, device: int, variant: Variant) -> Any:
        """The kernel on the device; on first use it is compiled (or fetched from the cache) and loaded."""
        key = device, variant.source.name
        if key not in self._loaded:
            self.load(device, variant, jit.build(variant.source))
        return self._loaded[key]

    def load(self, device: int, variant: Variant, binary: jit.Binary) -> None:
        """Load a kernel unless it is loaded already, and let it use as much shared memory as it can need."""
        with self._lock:
            if (device, variant.source.name) not in self._loaded:  # one that is may be running
                self._loaded[device, variant.source.name] = _load(device, variant, binary)

    def launch(self, on: OnStream, variant: Variant, grid: Grid, *arguments: Any) -> None:
        """Launch a kernel; tensors are passed as their addresses, None as a null pointer."""
        kernel = self.get(on.device, variant)
        values = (a.data_ptr() if isinstance(a, Tensor) else 0 if a is None else a for a in arguments)
        cuda_core().launch(on.stream, launch_config(grid, variant.threads), kernel, *values)

    def packed_launch(self, device: int, variant: Variant, grid: Grid) -> PackedLaunch:
        """Launches of a kernel whose only parameter is a struct."""
        return PackedLaunch(self.get(device, variant), variant, grid)

    def ctas_per_sm(self, device: int, variant: Variant, shared_bytes: int) -> int:
        """The CTAs with this much dynamic shared memory that an SM runs at once, by the driver."""
        key = device, variant.source.name, shared_bytes
        if key not in self._ctas_per_sm:
            of = self.get(device, variant).occupancy
            self._ctas_per_sm[key] = of.max_active_blocks_per_multiprocessor(variant.threads, shared_bytes)
        return self._ctas_per_sm[key]

    def has_room(self, on: OnStream, variant: Variant, grid: Grid) -> bool:
        """Whether the stream's SMs, perhaps a partition's, can run a cluster of this grid, by the driver."""
        key = on, variant.source.name, grid
        if key not in self._has_room:
            of, config = self.get(on.device, variant).occupancy, launch_config(grid, variant.threads)
            self._has_room[key] = of.max_active_clusters(config, stream=on.stream) > 0
        return self._has_room[key]


def _load(device: int, variant: Variant, binary: jit.Binary) -> Any:
    """A new kernel, with the shared memory that it can need."""
    from cuda.bindings import driver

    core, shared_bytes = cuda_core(), variant.shared_bytes(max(MAX_GROUPS, MAX_EXPERTS))
    core.Device(device).set_current()  # the context that torch uses too
    kernel = core.ObjectCode.from_cubin(binary.cubin).get_kernel(variant.source.entry)
    if shared_bytes > 0:
        of = driver.CUfunction_attribute
        for attribute, value in (
            (of.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            (of.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, 100),  # percent
        ):
            (status,) = driver.cuKernelSetAttribute(attribute, value, kernel.handle, device)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(f"shared memory: expected {shared_bytes} bytes per CTA, got {status.name}")
    return kernel


@functools.lru_cache(maxsize=4096)
def launch_config(grid: Grid, threads: int) -> Any:
    """cuda.core's configuration of a launch that may begin while the preceding one ends."""
    return cuda_core().LaunchConfig(
        grid=grid.clusters,
        cluster=grid.cluster,
        block=threads,
        shmem_size=grid.shared_bytes,
        programmatic_stream_serialization=True,
    )


def _native_config(grid: Grid, threads: int, stream: int) -> Any:
    """The driver's configuration of the same launch on a stream; nobody changes it."""
    from cuda.bindings import driver

    of = driver.CUlaunchAttributeID
    early, cluster = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    early.id = of.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    cluster.id = of.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dimension = cluster.value.clusterDim
    dimension.x, dimension.y, dimension.z = grid.cluster, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid.clusters * grid.cluster, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = grid.shared_bytes
    config.hStream = driver.CUstream(stream)
    config.attrs = [early, cluster] if grid.cluster > 1 else [early]
    config.numAttrs = len(config.attrs)
    return config
