"""Words in memory of the host that a stream of a GPU writes and waits for, in the order of its work."""

import ctypes
from typing import TYPE_CHECKING, Any, Protocol

from expertd_client.device_memory import call, get_driver, in_context, primary_context
from expertd_client.errors import InvalidRequestError, TransportUnavailableError

if TYPE_CHECKING:
    import torch

_CAN_WRITE_WORDS = 122  # CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
_PORTABLE_AND_MAPPED = 1 | 2
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ, cyclic
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_FIRST_PRIORITY = -100  # the driver takes the nearest that it has
_NAN_BYTE = ctypes.c_ubyte(0xFF)  # of which NaN consists, in BF16, FP16 and FP32


class CallerStream(Protocol):
    """Where a caller enqueues work. `write` and `wait` are for addresses that `register` gave."""

    def check(self) -> None:
        """Raises InvalidRequestError if nothing can be enqueued now."""

    def register(self, memory: memoryview) -> int:
        """Its address, for the rest of the process: work of the stream may be late."""

    def write(self, address: int, value: int) -> None:
        """Enqueue: write a word of 64 bits, after all that was enqueued before is visible."""

    def wait(self, address: int, value: int) -> None:
        """Enqueue: wait until a word is at least `value`."""

    def fill(self, array: Any) -> None:
        """Fill an array with NaN now, whatever the stream waits for."""


class CudaStream:
    """torch's current stream of a GPU, through the CUDA driver.

    Raises TransportUnavailableError if the driver or the GPU cannot do this.
    """

    def __init__(self, device: "torch.device") -> None:
        import torch

        self._index = index = device.index
        self._cuda = torch.cuda
        driver, self._context = get_driver(), primary_context(index)
        number, can_write = ctypes.c_int(), ctypes.c_int()
        call("cuDeviceGet", ctypes.byref(number), index)
        call("cuDeviceGetAttribute", ctypes.byref(can_write), _CAN_WRITE_WORDS, number)
        if not can_write.value:
            raise TransportUnavailableError(
                f"GPU {index}: expected one whose streams write words of 64 bits, got one that cannot"
            )
        # They let other threads of Python run, because they wait while the stream's queue is full.
        self._write, self._wait = driver.cuStreamWriteValue64_v2, driver.cuStreamWaitValue64_v2
        for function in (self._write, self._wait):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
        self._push, self._pop = driver.cuCtxPushCurrent_v2, driver.cuCtxPopCurrent_v2
        self._popped = ctypes.byref(ctypes.c_void_p())
        self._own = ctypes.c_void_p()  # for what must not wait
        with in_context(index):
            priority = ctypes.c_int(_FIRST_PRIORITY)
            call("cuStreamCreateWithPriority", ctypes.byref(self._own), _NON_BLOCKING, priority)

    def check(self) -> None:
        """As Stream.check."""
        if self._cuda.is_current_stream_capturing():
            raise InvalidRequestError(
                "enqueue: expected a stream that captures no CUDA graph, got one that does"
            )

    def register(self, memory: memoryview) -> int:
        """As Stream.register."""
        return register(self._index, memory)

    def write(self, address: int, value: int) -> None:
        """As Stream.write."""
        self._enqueue(self._write, address, value, 0)

    def wait(self, address: int, value: int) -> None:
        """As Stream.wait."""
        self._enqueue(self._wait, address, value, _AT_LEAST)

    def fill(self, array: "torch.Tensor") -> None:
        """As Stream.fill."""
        place, num_bytes = ctypes.c_uint64(array.data_ptr()), ctypes.c_size_t(array.nbytes)
        with in_context(self._index):
            call("cuMemsetD8Async", place, _NAN_BYTE, num_bytes, self._own)
            call("cuStreamSynchronize", self._own)

    def _enqueue(self, operation: Any, address: int, value: int, flags: int) -> None:
        # 0 is the default stream of the current context, and torch's current GPU may be another one.
        stream = self._cuda.current_stream(self._index).cuda_stream
        self._push(self._context)
        status = operation(stream, address, value, flags)
        self._pop(self._popped)
        if status:
            raise TransportUnavailableError(
                f"{operation.__name__}: expected CUDA_SUCCESS, got status {status}"
            )


def register(index: int, memory: memoryview) -> int:
    """The address that memory of the host has for a GPU, for the rest of the process.

    Raises DeviceMemoryError.
    """
    place = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    address = ctypes.c_uint64()
    with in_context(index):
        call("cuMemHostRegister_v2", place, ctypes.c_size_t(memory.nbytes), _PORTABLE_AND_MAPPED)
        call("cuMemHostGetDevicePointer_v2", ctypes.byref(address), place, 0)
    _registered.append(memory)
    return address.value


_registered: list[memoryview] = []  # to be kept: unregistering would wait for the streams
