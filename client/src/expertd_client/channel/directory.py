"""The channels of a client: one for each model and kind of memory."""

import logging
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from expertd_client.arenas import Holder, Need, Sizes
from expertd_client.calls import LayerCall
from expertd_client.channel.arena import ChannelArena, gpu_of
from expertd_client.channel.opening import Opened, RefusedError, open_largest
from expertd_client.deadline import Deadline
from expertd_client.device_memory import DeviceMemoryError
from expertd_client.errors import ExpertError, InvalidRequestError, TransportUnavailableError
from expertd_client.steps import Steps
from expertd_client.transport import NotThisCallError

logger = logging.getLogger("expertd_client")

# What the server's error is about if it refuses memory of a GPU rather than the channel.
_MEMORY = ("memory", "raw_handle", "device_id", "byte_size")
_ROUTING = "flags:"  # the layer needs routing in host memory


C = TypeVar("C", bound=ChannelArena)


class Directory(Generic[C]):
    """Safe from any thread. In a forked child it is empty again. `make`: an arena of an opened channel."""

    def __init__(self, max_places: int, make: Callable[[Opened, Holder[C]], C]) -> None:
        self._max_places = max_places
        self._make = make
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._holders: dict[tuple[str, int | None], Holder[C]] = {}
        self._refused_gpus: set[int] = set()
        self._routed_on_host: set[str] = set()
        self._closed = False

    def gpu_for(self, call: LayerCall) -> int | None:
        """The GPU in whose memory a call's channel is; None: in the host's."""
        gpu = gpu_of(call)
        if gpu in self._refused_gpus or (len(call.inputs) > 1 and call.model in self._routed_on_host):
            return None
        return gpu

    def holder(self, model: str, gpu: int | None) -> Holder[C]:
        """Of the model's channel."""
        if self._process != os.getpid():  # the parent's channels are closed here, and its locks unknown
            self._lock, self._holders, self._process = threading.Lock(), {}, os.getpid()
        key = model, gpu
        holder = self._holders.get(key)
        if holder is None:
            with self._lock:
                if self._closed:
                    raise ExpertError("client: expected an open one, got a closed one")
                holder = self._holders.setdefault(key, Holder(self._max_places))
        return holder

    def open(
        self, call: LayerCall, gpu: int | None, need: Need, sizes: Sizes, deadline: Deadline
    ) -> Steps[C | None]:
        """A channel for the holder; None if memory of this GPU, or more of it, is refused: then ask again.

        Raises NotThisCallError, and as `open_channel` does.
        """
        holder = self.holder(call.model, gpu)
        try:
            opened: Opened = yield from open_largest(call.model, need, sizes, gpu, deadline)
        except (RefusedError, TransportUnavailableError) as error:
            reason = error.error if isinstance(error, RefusedError) else error
            if gpu is not None and _is_about_memory(reason):
                holder.failed(need, None)
                self._refuse(gpu, reason)
                return None
            if not isinstance(error, RefusedError):
                holder.failed(need, None)
                raise
            if holder.failed(need, reason):
                raise NotThisCallError(reason) from error
            return None
        except BaseException:
            holder.failed(need, None)
            raise
        arena = self._make(opened, holder)
        holder.opened(arena)
        return arena

    def learn(self, error: InvalidRequestError, call: LayerCall, gpu: int | None) -> bool:
        """Whether the call that was refused would work in host memory."""
        if gpu is None or not str(error).startswith(_ROUTING):
            return False
        self._routed_on_host.add(call.model)
        return True

    def close(self) -> None:
        """Close the channels now, or after the last call of each."""
        with self._lock:
            self._closed = True
            holders = list(self._holders.values())
        if self._process == os.getpid():
            for holder in holders:
                holder.close()

    def _refuse(self, gpu: int, error: ExpertError) -> None:
        with self._lock:
            if gpu in self._refused_gpus:
                return
            self._refused_gpus.add(gpu)
        logger.warning("transport channel: memory of GPU %d: %s; taking host memory", gpu, error)


def _is_about_memory(error: ExpertError) -> bool:
    return isinstance(error, DeviceMemoryError) or str(error).startswith(_MEMORY)
