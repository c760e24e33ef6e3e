"""What a caller asks for when it opens a channel, and the memory that it gets."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from expertd.service.channels.call_channel import CallGeometry
from expertd.service.channels.geometry import Geometry
from expertd.service.channels.memory import DataRegion, SealedMemory
from expertd.service.channels.open_channel import Memory
from expertd.service.engine.errors import ChannelRefusedError
from expertd.service.engine.loading import LoadedLayers
from expertd.service.engine.spec import LayerSpec
from expertd.service.moe.request import row_bytes
from expertd_client.channel.layout import MAX_SLOTS

M = TypeVar("M", bound=DataRegion)


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Memory of a GPU that the caller exports: a CUDA IPC handle, and the bytes from its start on."""

    raw_handle: bytes
    byte_size: int


@dataclass(frozen=True, slots=True)
class CallMemory:
    """Memory of the server's GPU for calls that the caller's GPU makes by itself, and of that for answers."""


@dataclass(frozen=True, slots=True)
class NixlMemory:
    """Host memory of each side, between which NIXL carries tensors: that of the caller's end, as it says."""

    byte_size: int
    address: int
    metadata: str


@dataclass(frozen=True, slots=True)
class Opening:
    """A channel to open.

    models    at least one
    datatype  the widest of the caller's tensors, for the size of the default places; None: the models'
    memory    None: host memory with default places, an integer: that many bytes of it without such places
    caller    the name of the key with which it is opened, "" without one
    """

    models: tuple[str, ...]
    num_slots: int
    max_tokens: int
    datatype: str | None = None
    memory: int | CudaMemory | CallMemory | NixlMemory | None = None
    caller: str = ""

    @property
    def kind(self) -> Literal["system", "cuda", "device_calls", "nixl"]:
        if isinstance(self.memory, CallMemory):
            return "device_calls"
        if isinstance(self.memory, NixlMemory):
            return "nixl"
        return "cuda" if isinstance(self.memory, CudaMemory) else "system"

    def geometry(self, specs: Sequence[LayerSpec]) -> Geometry | CallGeometry:
        """The sizes of the channel, with the largest ones of its models. Raises ChannelRefusedError."""
        self.check(MAX_SLOTS, min(spec.max_request_tokens for spec in specs))
        sizes = (self.num_slots, self.max_tokens)
        largest = (max(spec.hidden_size for spec in specs), max(spec.top_k for spec in specs))
        if (
            isinstance(self.memory, NixlMemory)
            and len({(each.hidden_size, each.top_k) for each in specs}) > 1
        ):
            got = " and ".join(f"{each.hidden_size}, top {each.top_k}" for each in specs)
            raise ChannelRefusedError(f"models: expected equal sizes for a channel over NIXL, got {got:.200}")
        if isinstance(self.memory, CallMemory):
            return CallGeometry.for_slots(*sizes, *largest)
        widest = max(row_bytes(self.datatype or spec.datatype, 1) for spec in specs)
        default = Geometry.for_slots(*sizes, *largest, widest)
        if self.memory is None:
            return default
        num_bytes = self.memory if isinstance(self.memory, int) else self.memory.byte_size
        if num_bytes < 1:
            raise ChannelRefusedError(f"byte_size: expected at least 1, got {num_bytes}")
        return default.within(num_bytes)

    def check(self, max_slots: int, max_tokens: int) -> None:
        """Raise ChannelRefusedError for sizes outside these."""
        for name, value, limit in (
            ("num_slots", self.num_slots, max_slots),
            ("max_tokens", self.max_tokens, max_tokens),
        ):
            if not 1 <= value <= limit:
                raise ChannelRefusedError(f"{name}: expected 1 to {limit}, got {value}")

    async def allocate(self, geometry: Geometry, loaded: LoadedLayers) -> Memory:
        """The channel's memory, for `loaded`'s device. Raises ChannelRefusedError, OSError, RuntimeError."""
        # In threads: registering touches every page, about a second for four gigabytes.
        region: DataRegion
        if isinstance(self.memory, CudaMemory):
            region = await self._opened(self.memory, loaded)
        else:
            make = partial(SealedMemory, "expertd-channel-data", geometry.data_bytes, loaded.register)
            region = await _made(make)
        make = partial(SealedMemory, "expertd-channel", geometry.control_bytes, loaded.register)
        try:
            control = await _made(make)
        except BaseException:
            region.close()
            raise
        return Memory(geometry, control, region)

    async def _opened(self, memory: CudaMemory, loaded: LoadedLayers) -> DataRegion:
        if loaded.open_cuda is None:
            raise ChannelRefusedError(f"memory: expected system on backend {loaded.backend!r}, got cuda")
        try:
            return await _made(partial(loaded.open_cuda, memory.raw_handle, memory.byte_size))
        except ValueError as error:
            raise ChannelRefusedError(str(error)) from error


async def _made(make: Callable[[], M]) -> M:
    """What `make` returns, in a thread; closed if nobody waits for it any more."""
    making = asyncio.ensure_future(asyncio.to_thread(make))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        making.add_done_callback(_close)
        raise


def _close(made: "asyncio.Future[Any]") -> None:
    if not made.cancelled() and made.exception() is None:
        asyncio.get_running_loop().run_in_executor(None, made.result().close)
