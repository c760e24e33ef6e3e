"""The arenas of a client: one for each model and kind of memory."""

import logging
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from expertd_client.arenas import A, ArenaOpening, Holder, Lease, Need, Sizes
from expertd_client.calls import LayerCall
from expertd_client.deadline import Deadline
from expertd_client.device_memory import DeviceMemoryError
from expertd_client.errors import ExpertError, InvalidRequestError, TransportUnavailableError
from expertd_client.leasing import take_place
from expertd_client.places import layout_of
from expertd_client.steps import Steps
from expertd_client.transport import NotThisCallError

logger = logging.getLogger("expertd_client")
T = TypeVar("T")

# What the server's error is about if it refuses memory of a GPU rather than the channel.
_MEMORY = ("memory", "raw_handle", "device_id", "byte_size")
GROWTH_SECONDS = 0.5  # to open an arena that calls can do without; shorter than any Retry-After
_MIN_SECONDS = 1e-3  # a deadline has some
_TOKENS = "max_tokens:"  # beyond the server's limit of a request, over any transport
_ROUTING = "flags:"  # the layer needs routing in host memory


@dataclass(frozen=True, slots=True)
class Wanted:
    """An arena for calls of a model, at least for one that needs `need`, on a GPU or the host."""

    model: str
    need: Need
    opening: ArenaOpening
    gpu: int | None
    deadline: Deadline


Exchange = Callable[[LayerCall, Deadline, Lease[A], list[int]], Steps[bool]]
"""Has a call answered in a place; False if it needs another one. If it ends without an answer, it leaves the
request's number in the list: the server may still use the place."""


class ArenaRefusedError(Exception):
    """The server refuses an arena, for now or in this size; `error` says why."""

    def __init__(self, error: ExpertError) -> None:
        super().__init__(str(error))
        self.error = error


class Directory(Generic[A]):
    """Safe from any thread. In a forked child it is empty again.

    `make` makes an arena for a holder. It raises RefusedError, or TransportUnavailableError if there will be
    none, and what the server answers to any call.

    growth_seconds  to open an arena that calls can do without
    on_host         all arenas are in the host's memory
    """

    def __init__(
        self,
        max_places: int,
        make: Callable[[Wanted, Holder[A]], Steps[A]],
        growth_seconds: float = GROWTH_SECONDS,
        on_host: bool = False,
    ) -> None:
        self._max_places = max_places
        self._make = make
        self._growth_seconds, self._on_host = growth_seconds, on_host
        self.forget()
        self._refused_gpus: set[int] = set()
        self._routed_on_host: set[str] = set()
        self._closed = False
        _directories.add(self)

    def forget(self) -> None:
        """Be empty: after a fork, the parent's channels are closed here, and its locks unknown."""
        self._lock = threading.Lock()
        self._holders: dict[tuple[str, int | None], Holder[A]] = {}

    def answer(self, call: LayerCall, deadline: Deadline, exchange: Exchange[A]) -> Steps[None]:
        """Have a call answered in a place of its own. Raises DeadlineError, and what the other two do."""
        while not (yield from self._attempt(call, deadline, exchange)):
            pass

    def gpu_for(self, call: LayerCall) -> int | None:
        """The GPU in whose memory a call's channel is; None: in the host's."""
        gpu = None if self._on_host else gpu_of(call)
        if gpu in self._refused_gpus or (len(call.inputs) > 1 and call.model in self._routed_on_host):
            return None
        return gpu

    def holder(self, model: str, gpu: int | None) -> Holder[A]:
        """The holder of the arena for a model's calls."""
        holder = self._holders.get((model, gpu))
        if holder is None:
            with self._lock:
                if self._closed:
                    raise TransportUnavailableError("transport: expected an open one, got a closed one")
                holder = self._holders.setdefault((model, gpu), Holder(self._max_places))
        return holder

    def open(self, wanted: Wanted) -> Steps[A | None]:
        """An arena for the holder. None if memory of this GPU, or more places, are refused: then ask again.

        Raises NotThisCallError, TransportUnavailableError, and what else the server answers.
        """
        holder = self.holder(wanted.model, wanted.gpu)
        try:
            arena = yield from self._make(wanted, holder)
        except (ArenaRefusedError, ExpertError) as error:
            reason = error.error if isinstance(error, ArenaRefusedError) else error
            if not wanted.opening.is_needed:
                holder.failed(wanted.need, reason)
                return None
            if wanted.gpu is not None and _is_about_memory(reason):
                holder.failed(wanted.need, None)
                self._refuse(wanted.gpu, reason)
                return None
            if isinstance(reason, InvalidRequestError) and str(reason).startswith(_TOKENS):
                holder.failed(wanted.need, None)
                raise reason from error
            if not isinstance(error, ArenaRefusedError):
                holder.failed(wanted.need, None)
                raise
            holder.failed(wanted.need, reason)
            raise NotThisCallError(reason) from error
        except BaseException:
            holder.failed(wanted.need, None)
            raise
        holder.opened(arena)
        return arena

    def _attempt(self, call: LayerCall, deadline: Deadline, exchange: Exchange[A]) -> Steps[bool]:
        gpu, need = self.gpu_for(call), need_of(call)
        holder = self.holder(call.model, gpu)
        holder.enter()
        try:
            lease = yield from take_place(
                holder,
                need,
                deadline,
                lambda opening: self.open(
                    Wanted(call.model, need, opening, gpu, self._opening_deadline(opening, deadline))
                ),
            )
            if lease is None:
                return False
            unanswered: list[int] = []
            try:
                return (yield from exchange(call, deadline, lease, unanswered))
            finally:
                holder.give_back(lease, *unanswered)
        except InvalidRequestError as error:
            if not self._learn(error, call, gpu):
                raise
            return False
        finally:
            holder.leave()

    def _learn(self, error: InvalidRequestError, call: LayerCall, gpu: int | None) -> bool:
        """Whether the call that was refused would work in host memory."""
        if gpu is None or not str(error).startswith(_ROUTING):
            return False
        self._routed_on_host.add(call.model)
        return True

    def break_off(self) -> None:
        """End the channels, whose calls fail; later calls open others."""
        with self._lock:
            holders = list(self._holders.values())
        for holder in holders:
            holder.break_off()

    def close(self) -> None:
        """Close the channels now, or after the last call of each."""
        with self._lock:
            self._closed = True
            holders = list(self._holders.values())
        for holder in holders:
            holder.close()

    def _opening_deadline(self, opening: ArenaOpening, deadline: Deadline) -> Deadline:
        """The time to open an arena for a call, which may get a place of the current one if that fails."""
        if opening.is_needed:
            return deadline
        return Deadline(max(_MIN_SECONDS, min(self._growth_seconds, deadline.remaining() / 2)))

    def _refuse(self, gpu: int, error: ExpertError) -> None:
        with self._lock:
            if gpu in self._refused_gpus:
                return
            self._refused_gpus.add(gpu)
        logger.warning("transport channel: memory of GPU %d: %s; taking host memory", gpu, error)


def largest(wanted: Wanted, make: Callable[[Sizes], Steps[T]]) -> Steps[T]:
    """What `make` makes with the first of the sizes that are not refused. Raises RefusedError."""
    *larger, smallest = wanted.opening.sizes
    for sizes in larger:
        with suppress(ArenaRefusedError, DeviceMemoryError):
            return (yield from make(sizes))
    return (yield from make(smallest))


def gpu_of(call: LayerCall) -> int | None:
    """The GPU whose memory a call's hidden_states are in; None for the host's."""
    value = call.inputs[0].value
    if isinstance(value, np.ndarray) or value.device.type != "cuda":
        return None
    return int(value.device.index)


def need_of(call: LayerCall) -> Need:
    """What a place must hold for a call."""
    return Need(call.shape[0], layout_of(call).num_bytes)


def _is_about_memory(error: ExpertError) -> bool:
    return isinstance(error, DeviceMemoryError) or str(error).startswith(_MEMORY)


_directories: "weakref.WeakSet[Directory[Any]]" = weakref.WeakSet()


def _forget_in_child() -> None:
    for directory in list(_directories):
        directory.forget()


os.register_at_fork(after_in_child=_forget_in_child)
