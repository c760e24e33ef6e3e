"""A GPU, by torch.cuda; by CUDA's driver what that lacks, or takes longer for."""

import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from expertd.service.device.base import Copies, Device
from expertd.service.device.ipc import opener_for
from expertd.service.device.shared_gpu import SharedGpuMemory
from expertd.service.memory import Mapped, OpenCuda, Register, Unregister

_PORTABLE_AND_MAPPED = 1 | 2  # cudaHostRegister: in every context, and at the same address on the GPU

_one_at_a_time = threading.Lock()  # captures, and calls during which there must be none


class CudaDevice(Device):
    """See `Device`."""

    is_host = False

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.tensors)

    @property
    def num_sms(self) -> int:
        return int(torch.cuda.get_device_properties(self.tensors).multi_processor_count)

    def memory(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info(self.tensors)
        return total - free, total

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.tensors)

    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.tensors)[0]

    def free_unused(self, workspaces: bool = False) -> None:
        if workspaces:
            torch._C._cuda_clearCublasWorkspaces()  # torch keeps 32 MiB for every stream that cuBLAS ran on
        with _one_at_a_time:
            torch.cuda.empty_cache()
            torch._C._host_emptyCache()  # without it, each pool of graphs leaves 47 KiB on the host

    def uuids(self) -> tuple[str, ...]:
        return (f"GPU-{torch.cuda.get_device_properties(self.tensors).uuid}",)

    @property
    def is_shared_at_once(self) -> bool:
        """See `Device.is_shared_at_once`: by CUDA's Multi-Process Service (MPS)."""
        driver = _driver()
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        return bool(driver.cuDeviceGetAttribute(attribute, self.tensors.index)[1])

    def failure(self) -> str | None:
        try:
            self.synchronize()
        except RuntimeError as error:  # it is said again by every call from then on
            return str(error).partition("\n")[0]
        return None

    def prepare_thread(self) -> None:
        torch.cuda.set_device(self.tensors)
        torch.cuda.synchronize()

    def synchronize(self) -> None:
        """See `Device.synchronize`: during a capture it would fail, and so would the capture."""
        with _one_at_a_time:
            torch.cuda.synchronize(self.tensors)

    @property
    def register(self) -> Register:
        return self._register

    @property
    def register_files(self) -> Register:
        return self._register

    def _register(self, memory: Mapped) -> Unregister:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.tensors):
            status = runtime.cudaHostRegister(memory.address, memory.num_bytes, _PORTABLE_AND_MAPPED)
        if int(status):
            expected = f"{memory.num_bytes} bytes to be registered"
            raise RuntimeError(f"cudaHostRegister: expected {expected}, got {status}")
        return lambda: runtime.cudaHostUnregister(memory.address)

    @property
    def open_cuda(self) -> OpenCuda:
        return opener_for(self.tensors.index)

    def new_stream(self, priority: int = 0) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.tensors, priority=priority)  # type: ignore[no-untyped-call]

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.tensors)

    def is_current(self, stream: Any) -> bool:
        """See `Device.is_current`; in less time than by torch's own objects."""
        return bool(torch._C._cuda_getCurrentRawStream(stream.device_index) == stream.cuda_stream)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        return torch.cuda.stream(stream)

    def steps_on(self, stream: Any) -> AbstractContextManager[object]:
        return _CurrentStream(stream)

    def new_event(self, timing: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]

    def pinned(self, *size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        with torch.cuda.device(self.tensors):  # a new thread has the first one
            return torch.empty(*size, dtype=dtype, pin_memory=True)

    def bytes_at(self, address: int, num_bytes: int, index: int | None) -> Tensor:
        return _bytes_at(address, num_bytes, index)

    def copy(self, copies: Copies, stream: Any) -> None:
        driver = _driver()
        for to, source, num_bytes in copies:
            (status,) = driver.cuMemcpyAsync(to, source, num_bytes, stream.cuda_stream)
            if status != driver.CUresult.CUDA_SUCCESS:
                raise RuntimeError(
                    f"cuMemcpyAsync: expected {num_bytes} bytes to be copied, got {status.name}"
                )

    def signal(self, address: int, value: int, stream: Any) -> None:
        if self._write is not None:  # an error is one of the device, which the step reports
            self._write(stream.cuda_stream, address, value, 0)

    @functools.cached_property
    def _write(self) -> Any:
        """The driver's function for `signal`; None: the GPU cannot do it."""
        driver = _driver()
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        can_write = driver.cuDeviceGetAttribute(attribute, self.tensors.index)[1]
        return driver.cuStreamWriteValue64 if can_write else None

    def share(self, num_bytes: int) -> SharedGpuMemory:
        with torch.cuda.device(self.tensors):
            return SharedGpuMemory(self.tensors.index, num_bytes)

    def open_shared(self, descriptor: int, num_bytes: int) -> SharedGpuMemory:
        return SharedGpuMemory(self.tensors.index, num_bytes, descriptor)

    def new_graph_pool(self) -> "CudaGraphPool":
        return CudaGraphPool(self.tensors)


class CudaGraphPool:
    """See `GraphPool`; torch frees a pool with its last graph."""

    def __init__(self, device: torch.device) -> None:
        # The default stream cannot be captured. All graphs use one other: streams cannot share pool memory.
        self._side_stream = _side_stream(device.index or 0)
        nothing = torch.zeros((), device=device)
        self._anchor = _captured(nothing.zero_, self._side_stream, None)

    def capture(
        self, work: Callable[[], object], stream: torch.cuda.Stream, as_part: bool = False
    ) -> torch.cuda.CUDAGraph:
        """See `GraphPool.capture`."""
        # A partition's own stream is captured, so that the graph stays inside the partition.
        default = stream == torch.cuda.default_stream(stream.device)
        return _captured(work, self._side_stream if default else stream, self._anchor.pool(), as_part)


class _CurrentStream:
    """A context in which `stream` is current, within 1 to 2 µs, where torch's own took 8 to 11."""

    __slots__ = ("_before", "_key", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream  # which has to live as long
        self._key = stream.stream_id, stream.device_index, stream.device_type

    def __enter__(self) -> None:
        self._before = torch._C._cuda_getCurrentStream(self._stream.device_index)
        torch._C._cuda_setStream(*self._key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        torch._C._cuda_setStream(*self._before)


class _SideStream(torch.cuda.ExternalStream):
    """cuda.core's stream, for torch; it keeps that alive."""

    made: Any


@functools.cache
def _side_stream(index: int) -> torch.cuda.Stream:
    """A stream of a GPU for captures alone.

    torch has 32 streams, and gives them out again: what another thread enqueues there would be captured, too.
    """
    from cuda.core import Device as CoreDevice

    torch.cuda.synchronize(index)  # creates torch's context if there is none yet
    device = CoreDevice(index)
    device.set_current()
    stream = _SideStream(int((made := device.create_stream()).handle), index)  # type: ignore[no-untyped-call]
    stream.made = made
    return stream


def _captured(
    work: Callable[[], object], stream: torch.cuda.Stream, pool: Any, as_part: bool = False
) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph(keep_graph=as_part)
    with _one_at_a_time, _without_collections(), torch.cuda.stream(stream):
        # Other threads may use the device during the capture.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            work()
        except BaseException:
            with suppress(RuntimeError):  # the capture may be invalid already
                torch.zeros((), device=stream.device)  # torch warns about an empty graph
            with suppress(RuntimeError):  # it would only say that the capture is invalid
                graph.capture_end()
            raise
        graph.capture_end()
    return graph


@contextmanager
def _without_collections() -> Iterator[None]:
    """Destroying unreachable graphs and streams during a capture would invalidate it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _CudaArray:
    """A GPU's memory, for torch.as_tensor."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@functools.lru_cache(maxsize=1024)
def _bytes_at(address: int, num_bytes: int, _index: int | None) -> Tensor:
    # Cached, for it takes a while. Another GPU's memory may be at an address that was this one's before.
    return torch.as_tensor(_CudaArray(address, num_bytes))


@functools.cache
def _driver() -> Any:
    from cuda.bindings import driver  # not installed without a GPU

    return driver


def num_gpus() -> int:
    """The GPUs that this process sees; opens none."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def use_gpu(devices: Sequence[int], rank: int) -> None:
    """Make a rank's GPU of `devices` the current one.

    Raises ValueError if a GPU is missing, or its memory cannot be reached from the others.
    """
    count, own = torch.cuda.device_count(), devices[rank]
    if max(devices) >= count:
        raise ValueError(f"devices: expected GPUs from 0 to {count - 1}, got {max(devices)}")
    for other in devices:
        if other != own and not torch.cuda.can_device_access_peer(own, other):
            raise ValueError(f"devices: expected GPUs that reach each other's memory, got {own} and {other}")
    torch.cuda.set_device(own)
