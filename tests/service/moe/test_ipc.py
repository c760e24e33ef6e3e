"""Opening GPU memory of other processes, with a driver that is not there; the real one is tested on a GPU."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertd.service.device import device_of, ipc
from expertd.service.memory import HIDDEN, Span

HANDLE = bytes(range(64))
OK, FAILED = 0, SimpleNamespace(name="CUDA_ERROR_INVALID_CONTEXT")


class _Handle:
    def __init__(self) -> None:
        self.bytes = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self.bytes)


class Driver:
    """One allocation of 8192 bytes at 4096; its handle opens it at `pointer`."""

    def __init__(self, pointer: int = 4096) -> None:
        self.pointer = pointer
        self.open = 0
        self.given = b""
        self.opening: Any = OK
        self.ranging: Any = OK
        self.naming: Any = OK
        self.ordinal = 1
        self.ending: Any = OK
        self.copied: tuple[int, bytes] | None = None

    CUipcMemHandle = _Handle

    def cuIpcOpenMemHandle(self, handle: _Handle, flags: int) -> tuple[Any, int]:  # noqa: N802
        assert flags == 1, "peer access"
        self.given = handle.bytes.raw
        self.open += not self.opening
        return self.opening, self.pointer

    def cuMemGetAddressRange(self, pointer: int) -> tuple[Any, int, int]:  # noqa: N802
        return self.ranging, 4096, 8192

    CUpointer_attribute = SimpleNamespace(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL="ordinal")

    def cuPointerGetAttribute(self, attribute: str, pointer: int) -> tuple[Any, int]:  # noqa: N802
        assert attribute == "ordinal"
        return self.naming, self.ordinal

    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def cuStreamCreate(self, flags: int) -> tuple[Any, str]:  # noqa: N802
        assert flags == 1
        return OK, "stream"

    def cuMemcpyHtoDAsync(  # noqa: N802
        self, target: int, source: int, num_bytes: int, stream: str
    ) -> tuple[Any]:
        assert stream == "stream"
        self.copied = target, ctypes.string_at(source, num_bytes)
        return (OK,)

    def cuStreamSynchronize(self, stream: str) -> tuple[Any]:  # noqa: N802
        assert stream == "stream"
        assert self.copied
        return (self.ending,)

    def cuIpcCloseMemHandle(self, pointer: int) -> tuple[Any]:  # noqa: N802
        assert pointer == self.pointer
        self.open -= 1
        return (OK,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(ipc, "_driver", lambda index: driver)
    ipc._stream.cache_clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return driver


def open_cuda(handle: bytes, num_bytes: int) -> Any:
    opener = ipc.opener_for(0)
    assert opener is not None
    return opener(handle, num_bytes)


def test_a_cpu_opens_nothing() -> None:
    assert device_of("cpu").open_cuda is None


@pytest.mark.parametrize(
    ("naming", "ordinal", "device"), [(OK, 1, 1), (FAILED, 0, HIDDEN), (OK, -2, HIDDEN), (OK, 2, HIDDEN)]
)
def test_memory_is_open_until_it_is_closed(driver: Driver, naming: Any, ordinal: int, device: int) -> None:
    driver.naming, driver.ordinal = naming, ordinal
    memory = open_cuda(HANDLE, 8192)
    assert memory.span == Span(4096, 8192, device), "the driver knows it, if it is not hidden"
    assert (driver.given, driver.open) == (HANDLE, 1)
    memory.close()
    assert driver.open == 0


@pytest.mark.parametrize(
    ("handle", "num_bytes", "expected"),
    [
        (HANDLE[:-1], 1, "raw_handle: expected 64 bytes, got 63"),
        (HANDLE, 8193, "byte_size: expected at most the allocation's 8192, got 8193"),
    ],
)
def test_wrong_arguments_are_refused(driver: Driver, handle: bytes, num_bytes: int, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}$"):
        open_cuda(handle, num_bytes)
    assert driver.open == 0


def test_bytes_are_written_and_waited_for(driver: Driver) -> None:
    memory = open_cuda(HANDLE, 8192)
    memory.write(64, memoryview(b"some bytes"))
    assert driver.copied == (4096 + 64, b"some bytes")
    driver.ending = FAILED
    with pytest.raises(RuntimeError, match=r"^a copy to a region .* failed: CUDA_ERROR_INVALID_CONTEXT$"):
        memory.write(0, memoryview(b"x"))


def test_only_the_bytes_behind_the_handles_address_count(driver: Driver) -> None:
    driver.pointer = 4096 + 8000
    with pytest.raises(ValueError, match=r"^byte_size: expected at most the allocation's 192, got 193$"):
        open_cuda(HANDLE, 193)
    open_cuda(HANDLE, 192)
    assert driver.open == 1


def test_errors_of_the_driver_are_sentences(driver: Driver) -> None:
    driver.opening = FAILED
    expected = r"^raw_handle: expected a handle of another process's memory that GPU 0 can access, "
    with pytest.raises(ValueError, match=expected + "got CUDA_ERROR_INVALID_CONTEXT$"):
        open_cuda(HANDLE, 1)
    driver.opening, driver.ranging = OK, FAILED
    with pytest.raises(ValueError, match=r"^byte_size: expected at most the allocation's 0, got 1$"):
        open_cuda(HANDLE, 1)
    assert driver.open == 0
