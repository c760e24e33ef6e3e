"""The CPU: what others enqueue is done when it is called."""

import ctypes
import platform
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from expertd.service.device.base import Copies, Device, Event, GraphPool, Stream
from expertd.service.device.host_memory import free_host_bytes
from expertd.service.memory import Register, nothing_to_register
from expertd.service.util.heap import give_back_freed


class _Event:
    """An event that has passed once it is recorded."""

    def record(self, stream: Any) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "_Event") -> float:
        return (end._at - self._at) * 1e3


class _Stream:
    """A stream on which nothing is left to wait for."""

    stream_id = 0

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class CpuDevice(Device):
    """See `Device`."""

    is_host = True
    num_sms = None
    register_files = None
    open_cuda = None
    _stream = _Stream()

    @property
    def name(self) -> str:
        return f"cpu ({platform.machine()})"

    def memory(self) -> tuple[int, int] | None:
        return None

    def reserved_bytes(self) -> int:
        return 0

    def free_bytes(self) -> int:
        return free_host_bytes()

    def free_unused(self, workspaces: bool = False) -> None:
        give_back_freed()

    def uuids(self) -> tuple[str, ...]:
        return ()

    @property
    def is_shared_at_once(self) -> bool:
        return True

    def failure(self) -> str | None:
        return None

    def prepare_thread(self) -> None: ...

    def synchronize(self) -> None: ...

    @property
    def register(self) -> Register:
        return nothing_to_register

    def new_stream(self, priority: int = 0) -> Stream:
        return self._stream

    def current_stream(self) -> Stream:
        return self._stream

    def is_current(self, stream: Stream) -> bool:
        return True

    def on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def steps_on(self, stream: Stream) -> AbstractContextManager[object]:
        return nullcontext()

    def new_event(self, timing: bool = False) -> Event:
        return _Event()

    def pinned(self, *size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.empty(*size, dtype=dtype)

    def bytes_at(self, address: int, num_bytes: int, index: int | None) -> Tensor:
        return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)

    def copy(self, copies: Copies, stream: Stream) -> None:
        for to, source, num_bytes in copies:
            ctypes.memmove(to, source, num_bytes)

    def signal(self, address: int, value: int, stream: Stream) -> None:
        ctypes.c_uint64.from_address(address).value = value

    def new_graph_pool(self) -> GraphPool:
        raise RuntimeError("graphs: expected a device that captures them, got a CPU")
