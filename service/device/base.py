"""What the service asks of the device that holds its layers, beside tensors."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from expertd.service.memory import OpenCuda, Register, SharedMemory


class Event(Protocol):
    """As `torch.Event`."""

    def record(self, stream: Any) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end: Any) -> float: ...


class Stream(Protocol):
    """As `torch.Stream`."""

    @property
    def stream_id(self) -> int: ...
    def wait_event(self, event: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


class Graph(Protocol):
    """Work that was captured, to be replayed on the current stream."""

    def replay(self) -> None: ...
    def reset(self) -> None: ...


class GraphPool(Protocol):
    """Memory shared by graphs that never run at the same time; it is freed with the last of them."""

    def capture(self, work: Callable[[], object], stream: Any, as_part: bool = False) -> Graph:
        """A graph of `work`, to be replayed on `stream`. It must have run once before.

        as_part  for a larger graph, by its `raw_cuda_graph`, and not to be replayed
        """


class Copies:
    """Copies by address, to enqueue together; those that continue the one before become one."""

    def __init__(self) -> None:
        self._copies: list[list[int]] = []  # destination, source, bytes
        self._last_owner: object = None

    def add(self, to: int, source: int, num_bytes: int, owner: object) -> None:
        """Copy `num_bytes` from address `source`, of the device or of pinned memory, to address `to`.

        owner  the same object for copies whose destinations are in one allocation, and whose sources are
               in one. Only these become one, for CUDA refuses a copy across two. None: stays alone
        """
        if to == source or num_bytes == 0:
            return
        if self._copies and owner is not None and owner is self._last_owner:
            last_to, last_source, last_bytes = self._copies[-1]
            if last_to + last_bytes == to and last_source + last_bytes == source:
                self._copies[-1][2] += num_bytes
                return
        self._copies.append([to, source, num_bytes])
        self._last_owner = owner

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._copies)

    def __len__(self) -> int:
        return len(self._copies)


class Device(ABC):
    """One device of this process. Where nothing else is said, call from any thread.

    tensors  where torch has its tensors
    """

    is_host: ClassVar[bool]
    """Whether it computes during calls, in the host's memory: steps then need neither streams nor copies."""

    def __init__(self, tensors: torch.device) -> None:
        self.tensors = tensors

    @property
    @abstractmethod
    def name(self) -> str:
        """For people."""

    @property
    @abstractmethod
    def num_sms(self) -> int | None:
        """The SMs that partitions can share; None: it has none."""

    @abstractmethod
    def memory(self) -> tuple[int, int] | None:
        """(used, total) bytes of its memory, of all processes; None: it is the host's."""

    @abstractmethod
    def reserved_bytes(self) -> int:
        """What torch has of its memory, in use or not; 0 if it is the host's."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that can be allocated: of its memory, or of the host's within the container's limit."""

    @abstractmethod
    def free_unused(self, workspaces: bool = False) -> None:
        """Free what is kept for later, such as the memory of graphs that are gone.

        workspaces  also those of libraries, which no graph may use
        """

    @abstractmethod
    def uuids(self) -> tuple[str, ...]:
        """The UUID of a GPU, as the driver's tools know it; () for others."""

    @property
    @abstractmethod
    def is_shared_at_once(self) -> bool:
        """Whether kernels of several processes run there at the same time, instead of in turns."""

    @abstractmethod
    def failure(self) -> str | None:
        """Why it computes nothing any more in this process, as after a kernel that faulted; None if it does.

        Waits for what runs there: ask after a step has failed.
        """

    @abstractmethod
    def prepare_thread(self) -> None:
        """Make it the current device of this thread, also for calls that do not go through torch."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all of its work; not during a capture."""

    @property
    @abstractmethod
    def register(self) -> Register:
        """Makes host memory accessible to it."""

    @property
    @abstractmethod
    def register_files(self) -> Register | None:
        """Likewise, for files of callers, who may shrink them; None: the CPU copies from those."""

    @property
    @abstractmethod
    def open_cuda(self) -> OpenCuda | None:
        """Makes GPU memory of other processes accessible to it; None: it cannot."""

    @abstractmethod
    def new_stream(self, priority: int = 0) -> Stream:
        """A stream; those of lower priority numbers come first."""

    @abstractmethod
    def current_stream(self) -> Stream:
        """This thread's current stream."""

    @abstractmethod
    def is_current(self, stream: Stream) -> bool:
        """Whether `stream` is this thread's current one."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """Makes the device, and `stream`, current."""

    @abstractmethod
    def steps_on(self, stream: Stream) -> AbstractContextManager[object]:
        """As `on`, in less time, on a thread of `prepare_thread`; not reentrant."""

    @abstractmethod
    def new_event(self, timing: bool = False) -> Event:
        """An event, which also tells time if `timing`."""

    @abstractmethod
    def pinned(self, *size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        """Host memory, uninitialized, that the device can read and write."""

    @abstractmethod
    def bytes_at(self, address: int, num_bytes: int, index: int | None) -> Tensor:
        """Memory that it can access, as uint8; the tensor does not keep it.

        index  the number of the GPU that has the memory
        """

    @abstractmethod
    def copy(self, copies: Copies, stream: Stream) -> None:
        """Start all copies on `stream`. Raises RuntimeError."""

    @abstractmethod
    def signal(self, address: int, value: int, stream: Stream) -> None:
        """Write 8 bytes once all that is enqueued on `stream` is done, and visible; nothing if it cannot."""

    def share(self, num_bytes: int) -> SharedMemory:
        """Zeros in its memory, for another process, too. Raises RuntimeError."""
        raise RuntimeError(f"shared memory: expected a GPU, got {self.name}")

    def open_shared(self, descriptor: int, num_bytes: int) -> SharedMemory:
        """What another process shares, of any GPU whose memory this one reaches. Raises RuntimeError."""
        raise RuntimeError(f"shared memory: expected a GPU, got {self.name}")

    @abstractmethod
    def new_graph_pool(self) -> GraphPool:
        """Memory for graphs; only for backends with `Capabilities.captures`."""
