"""A registered region whose places are shared by calls."""

import os
import re
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from expertd_client.arenas import Arena, Sizes
from expertd_client.calls import LayerCall
from expertd_client.deadline import Deadline
from expertd_client.device_memory import DeviceMemory, DeviceMemoryError
from expertd_client.directory import RefusedError, Wanted, largest
from expertd_client.errors import (
    AccessDeniedError,
    DeadlineError,
    ExpertError,
    InvalidRequestError,
    ServerBusyError,
    ServerUnreachableError,
    TransportUnavailableError,
)
from expertd_client.gpu_places import GpuPlaces
from expertd_client.http.requests import Placed
from expertd_client.places import copy_in, copy_out, layout_of
from expertd_client.shared_memory.files import SharedFile
from expertd_client.steps import Steps, Work
from expertd_client.transport import Asker

if TYPE_CHECKING:
    import torch

# What the server's error is about if it may take another region: it has no room, or the name is taken.
_ABOUT_THIS_REGION = ("region", "byte_size", "name")
# In the server's error; only what cannot lead out of /dev/shm.
_DEMANDED_PREFIX = re.compile(r"^key: expected .*shared_memory\.key_prefix \('([\w.-]{1,128})'\)")
_UNREGISTERED = "expected a registered region"
_IN_MEMORY = ("hidden_states", "topk_ids", "topk_weights")


class Closed(NamedTuple):
    """A region that is to be unregistered, and memory of a GPU that may be freed only then."""

    name: str
    kind: Literal["system", "cuda"]
    memory: object


class RegionArena(Arena):
    """A region of host memory, or of a GPU's. Once closed, it is in `closed`, to be unregistered."""

    def __init__(
        self,
        sizes: Sizes,
        name: str,
        file: SharedFile | None,
        data: "torch.Tensor | None",
        closed: list[Closed],
    ) -> None:
        super().__init__(sizes)
        self.name = name
        self._file = file
        self._gpu = None if data is None else GpuPlaces(data)
        self._closed = closed
        self._process = os.getpid()
        self._is_lost = False

    def is_usable(self) -> bool:
        """Whether the server still has it, as far as is known; False in a forked child."""
        return not self._is_lost and self._process == os.getpid()

    def abandon(self, place: int, request: int) -> None:
        """Nobody will know when the server is done with the place, so the region is replaced."""
        self._is_lost = True

    def lose(self) -> None:
        """The server does not have it any more."""
        self._is_lost = True

    def close(self) -> None:
        """Remove the file. Then, if nobody unregisters it, the server frees the region by itself."""
        memory = None if self._gpu is None else self._gpu.data
        self._closed.append(Closed(self.name, "system" if memory is None else "cuda", memory))
        self.discard()

    def discard(self) -> None:
        """Free the memory."""
        if self._file is not None:
            self._file.close()
        self._file = self._gpu = None

    def fill(self, call: LayerCall, place: int) -> Placed:
        """Copy a call's inputs to a place. Raises InvalidRequestError."""
        where, start = layout_of(call), place * self.sizes.place_bytes
        if self._gpu is not None:
            # The server checks routing only in host memory.
            self._gpu.copy_in(start, call, where, with_routing=False)
            return Placed(self.name, start, where, _IN_MEMORY[:1])
        copy_in(self._bytes(start, where.num_bytes), call, where)
        return Placed(self.name, start, where, _IN_MEMORY)

    def fetch(self, call: LayerCall, place: int) -> None:
        """Copy a call's output from its place."""
        where, start = layout_of(call), place * self.sizes.place_bytes
        if self._gpu is not None:
            self._gpu.copy_out(start, call, where)
        else:
            copy_out(self._bytes(start, where.num_bytes), call, where)

    def _bytes(self, start: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        assert self._file is not None
        return self._file.data[start : start + num_bytes]


_kept: list[object] = []  # memory of GPUs that a server may still use


def is_unregistered(error: InvalidRequestError) -> bool:
    """Whether a request failed because the server has freed the region."""
    return error.status is not None and _UNREGISTERED in str(error)


def is_answer(error: ExpertError) -> bool:
    """Whether the server is done with a request that failed so, or has never had it."""
    return isinstance(error, InvalidRequestError | ServerBusyError) or (error.status or 0) >= 400


def make_region(http: Asker, wanted: Wanted, closed: list[Closed]) -> Steps[RegionArena]:
    """A registered region. Raises RefusedError, TransportUnavailableError."""
    about = yield from http.request("GET", "/v2", wanted.deadline)
    kind = "system" if wanted.gpu is None else "cuda"
    extensions = about.get("extensions", ()) if isinstance(about, dict) else ()
    if f"{kind}_shared_memory" not in extensions:
        text = f"extensions: expected {kind}_shared_memory, got {', '.join(map(str, extensions))}"
        if "system_shared_memory" in extensions:
            raise DeviceMemoryError(text)
        raise TransportUnavailableError(text, is_offered=False)
    return (yield from largest(wanted, lambda sizes: _register(http, wanted, sizes, closed)))


def unregister(http: Asker, closed: list[Closed], deadline: Deadline) -> Steps[None]:
    """Unregister the regions that were closed, as far as the server answers; it waits for their requests."""
    while closed:
        region = closed.pop()
        is_done = False
        try:
            path = f"/v2/{region.kind}sharedmemory/region/{region.name}/unregister"
            yield from http.request("POST", path, deadline)
            is_done = True
        except ExpertError as error:
            is_done = (error.status or 0) >= 400 and not isinstance(error, ServerBusyError)
            if not is_done:
                return
        finally:
            if not is_done:
                closed.append(region)


def keep_memory(closed: list[Closed]) -> None:
    """Never free the memory of regions that could not be unregistered: under a step, that is undefined."""
    _kept.extend(region.memory for region in closed if region.memory is not None)


def _register(
    http: Asker, wanted: Wanted, sizes: Sizes, closed: list[Closed], prefix: str = ""
) -> Steps[RegionArena]:
    kind = "system" if wanted.gpu is None else "cuda"
    # An error refers to this frame, and is kept for a while: the arena alone may refer to its memory.
    made: tuple[RegionArena, dict[str, Any]] = yield Work(partial(_region, wanted.gpu, sizes, closed, prefix))
    arena, body = made
    try:
        path = f"/v2/{kind}sharedmemory/region/{arena.name}/register"
        yield from http.request("POST", path, wanted.deadline, body)
    except BaseException as error:
        if _is_unknown(error):
            arena.close()
        else:
            arena.discard()
        if not prefix and (demanded := _DEMANDED_PREFIX.search(str(error))):
            return (yield from _register(http, wanted, sizes, closed, demanded[1]))
        raise _refusal(error) from error
    return arena


def _region(
    gpu: int | None, sizes: Sizes, closed: list[Closed], prefix: str
) -> tuple[RegionArena, dict[str, Any]]:
    """New memory, and what the server must know of it. Raises RefusedError and DeviceMemoryError."""
    name = f"expertd-client-{secrets.token_hex(16)}"
    if gpu is not None:
        memory = DeviceMemory(gpu, sizes.num_bytes)
        return RegionArena(sizes, name, None, memory.tensor(), closed), memory.described()
    try:
        file = SharedFile(sizes.num_bytes, prefix)
    except OSError as error:
        text = f"shared memory: expected {sizes.num_bytes} bytes in /dev/shm, got {error}"
        raise RefusedError(TransportUnavailableError(text)) from error
    body = {"key": file.key, "offset": 0, "byte_size": sizes.num_bytes}
    return RegionArena(sizes, name, file, None, closed), body


def _is_unknown(error: BaseException) -> bool:
    """Whether the server may have the region although its registration failed."""
    if not isinstance(error, ExpertError) or not is_answer(error):
        return True
    return str(error).startswith("name")  # taken: by the same request, sent again after a lost connection


def _refusal(error: BaseException) -> BaseException:
    """What a failed registration means."""
    if not isinstance(error, ExpertError):
        return error
    if isinstance(error, AccessDeniedError | DeadlineError | ServerUnreachableError):
        return error
    if isinstance(error, InvalidRequestError) and not str(error).startswith(_ABOUT_THIS_REGION):
        return TransportUnavailableError(str(error), error.status)
    return RefusedError(error)
