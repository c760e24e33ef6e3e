"""Calls that GPUs of callers make by themselves, as the threads of steps and channels see them."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from expertd.device_calls import CallCounts, CallSlot
from expertd.service.memory import SharedMemory


class Calls(Protocol):
    """What the worker thread says to the graph that answers calls; it holds the device."""

    @property
    def are_made(self) -> bool:
        """Whether there are callers; on any thread."""

    def start(self) -> bool:
        """Answer calls until `stop`; nothing if there are no callers, or it is started.

        False: what is there was answered, and the thread must come again soon, for another thread holds them.
        """

    def hold(self) -> None:
        """Have calls answered in turns only, so that the device is free in between; on any thread."""

    def let_go(self) -> None:
        """End a `hold`."""

    def stop(self) -> None:
        """End after the step that runs, and wait for it; nothing if it is not started."""

    def run(self) -> None:
        """Answer the calls that are there, and wait for that: the device has no other step then."""


class NoCalls:
    """The calls of a device that answers none."""

    are_made = False

    def start(self) -> bool:
        return True

    def hold(self) -> None: ...

    def let_go(self) -> None: ...

    def stop(self) -> None: ...

    def run(self) -> None: ...


class CallServer(Calls, Protocol):
    """Also what channels ask, between steps, on the worker thread. Implemented by `DeviceCalls`.

    max_tokens  of a call
    gpu         the UUID of the one that answers
    own_gpu     what callers on that GPU get: "mps", or "turns"
    """

    max_tokens: int
    gpu: str
    own_gpu: str

    def answers(self, model: str) -> bool:
        """Whether it answers calls to a layer that is loaded; on any thread."""

    def prepare(self, model: str) -> None:
        """Capture the steps of calls to a layer.

        Raises ValueError if it answers none; ModelUnloadedError if it is not loaded any more.
        """

    def share(self, num_bytes: int) -> SharedMemory:
        """Memory for calls. Raises RuntimeError."""

    def open_shared(self, descriptor: int, num_bytes: int) -> SharedMemory:
        """What a caller shares. Raises RuntimeError."""

    def connect(self, models: tuple[str, ...], slots: Sequence[CallSlot]) -> list[int]:
        """Answer what is called at these slots from now on; their numbers. Raises ValueError."""

    def disconnect(self, indices: Sequence[int], *memories: SharedMemory) -> None:
        """Answer these slots no more, and forget their memory."""

    def forget(self, model: str) -> None:
        """The layer is unloaded: refuse calls to it."""

    def counts(self) -> Mapping[str, CallCounts]:
        """By model, also of those that were unloaded; on any thread."""

    def num_calls(self, index: int) -> int:
        """The number of calls that a slot's caller has made; on any thread."""

    def has_fault(self, indices: Sequence[int]) -> bool:
        """Whether the caller of these slots has sent an invalid header; on any thread."""
