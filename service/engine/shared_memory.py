"""Callers' shared memory: registered and freed off the event loop, and freed when its caller seems gone."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from expertd.service.engine.errors import (
    NotReadyError,
    RegionRefusedError,
    SharedMemoryDisabledError,
    UnknownRegionError,
)
from expertd.service.engine.loading import LoadedLayers
from expertd.service.memory import (
    Arena,
    DeviceMemory,
    Region,
    RegionError,
    RegionKind,
    Regions,
    RegionUses,
    SystemMemory,
)
from expertd.service.memory.system import file_name
from expertd.service.settings.parts import SharedMemorySettings
from expertd.service.util.sentences import shown

logger = logging.getLogger(__name__)

CHECK_SECONDS = 30.0  # between two searches for abandoned regions


class RegisteredRegions:
    """The regions that callers registered. All methods but `uses` belong to the event loop."""

    def __init__(self, settings: SharedMemorySettings) -> None:
        self._settings = settings
        self._regions = Regions(settings.max_regions, settings.max_bytes)
        self._loaded: LoadedLayers | None = None
        self._arena: Arena | None = None
        self._one_at_a_time = asyncio.Lock()  # the pool's other threads stay free for requests
        self._opening: dict[str, tuple[RegionKind, asyncio.Task[None]]] = {}
        self._freeing: dict[Region, asyncio.Task[None]] = {}
        self._checking: asyncio.Task[None] | None = None

    @property
    def enabled(self) -> bool:
        """Whether the settings allow shared memory."""
        return self._settings.enabled

    @property
    def extensions(self) -> list[str]:
        """The protocol extensions that callers can use."""
        on_gpu = self._loaded is not None and self._loaded.open_cuda is not None
        names = ["system_shared_memory", *(["cuda_shared_memory"] if on_gpu else [])]
        return names if self.enabled else []

    def start(self, loaded: LoadedLayers, arena: Arena) -> None:
        """Accept regions from now on, for the device of `loaded`."""
        self._loaded, self._arena = loaded, arena
        if self.enabled:
            self._checking = asyncio.get_running_loop().create_task(self._check())

    async def stop(self) -> None:
        """Free all regions, once the worker thread has ended: it might still use them."""
        if self._checking is not None:
            self._checking.cancel()
        regions = [*self._regions.of_kind("system"), *self._regions.of_kind("cuda")]
        await self._free([region for region in regions if not region.uses])

    def uses(self) -> RegionUses | None:
        """The regions of a new request; None if shared memory is off. From any thread."""
        if not self.enabled or self._arena is None:
            return None
        return RegionUses(self._regions, self._arena.take)

    def totals(self) -> Mapping[str, tuple[int, int]]:
        """(number of regions, bytes) of each kind."""
        return {"system": self._regions.totals("system"), "cuda": self._regions.totals("cuda")}

    async def register_system(self, name: str, key: str, offset: int, num_bytes: int) -> None:
        """Register a file of /dev/shm. Raises RegionRefusedError, SharedMemoryDisabledError."""
        loaded = self._check_ready()
        register = loaded.register_files
        prefix = self._settings.key_prefix

        def opened() -> SystemMemory:
            if not file_name(key).startswith(prefix):
                expected = f"a name that begins with shared_memory.key_prefix ({shown(prefix)})"
                raise RegionError(f"key: expected {expected}, got {shown(key)}")
            return SystemMemory(key, offset, num_bytes, register)

        await self._register(name, "system", num_bytes, opened, {"key": key, "offset": offset})

    async def register_cuda(self, name: str, handle: bytes, device_id: int, num_bytes: int) -> None:
        """Register a GPU's memory. Raises RegionRefusedError, SharedMemoryDisabledError."""
        loaded = self._check_ready()
        if loaded.open_cuda is None:
            got = f"backend {loaded.backend!r} on {loaded.device}"
            raise RegionRefusedError(f"cuda shared memory: expected a GPU, or several of one node, got {got}")
        opened = partial(loaded.open_cuda, handle, num_bytes)
        await self._register(name, "cuda", num_bytes, opened, {"device_id": device_id})

    async def unregister(self, kind: RegionKind, name: str | None = None) -> None:
        """Unregister a region of a kind, or all, and wait until requests that use them are done.

        A name that is not registered is no error; one that is being registered is waited for.
        """
        self._check_ready()
        opening = [task for key, (of, task) in self._opening.items() if of == kind and name in (None, key)]
        if opening:
            await asyncio.wait(opening)
        known = [*self._regions.of_kind(kind), *(r for r in self._freeing if r.kind == kind)]
        await self._free([region for region in known if name in (None, region.name)])

    def status(self, kind: RegionKind, name: str | None = None) -> list[Region]:
        """A region of a kind, or all. Raises UnknownRegionError, SharedMemoryDisabledError."""
        self._check_ready()
        found = [region for region in self._regions.of_kind(kind) if name in (None, region.name)]
        if name is not None and not found:
            raise UnknownRegionError(f"name: expected a registered {kind} region, got {shown(name)}")
        return found

    async def free_abandoned(self) -> None:
        """Free the regions whose callers seem to be gone."""
        regions = [*self._regions.of_kind("system"), *self._regions.of_kind("cuda")]
        gone = [region for region in regions if region.is_abandoned(self._settings.idle_seconds)]
        for region in gone:
            logger.info("unregistered %s region %s: its caller seems gone", region.kind, shown(region.name))
        await self._free(gone)

    def _check_ready(self) -> LoadedLayers:
        if not self.enabled:
            raise SharedMemoryDisabledError(
                "shared memory: expected shared_memory.enabled to be true in the server's settings, got false"
            )
        if self._loaded is None:
            raise NotReadyError("shared memory: expected a server that has loaded, got one that is loading")
        return self._loaded

    async def _register(
        self,
        name: str,
        kind: RegionKind,
        num_bytes: int,
        opened: Callable[[], SystemMemory | DeviceMemory],
        details: Mapping[str, str | int],
    ) -> None:
        async def register() -> None:
            try:
                async with self._one_at_a_time:
                    memory = await asyncio.to_thread(opened)
            except BaseException:
                self._regions.forget(name)
                raise
            finally:
                del self._opening[name]
            self._regions.add(Region(name, kind, num_bytes, memory, details))

        try:
            self._regions.reserve(name, num_bytes)
            # A caller that no longer waits must not end the work.
            task = asyncio.get_running_loop().create_task(register())
            self._opening[name] = kind, task
            await asyncio.shield(task)
        except ValueError as error:
            raise RegionRefusedError(str(error)) from error

    async def _free(self, regions: list[Region]) -> None:
        for region in regions:
            if region not in self._freeing:
                self._freeing[region] = asyncio.get_running_loop().create_task(self._free_one(region))
        # A caller that no longer waits must not end the work.
        await asyncio.gather(*(asyncio.shield(self._freeing[region]) for region in regions))

    async def _free_one(self, region: Region) -> None:
        idle, loop = asyncio.Event(), asyncio.get_running_loop()
        self._regions.remove(region, lambda: loop.call_soon_threadsafe(idle.set))
        await idle.wait()
        try:
            async with self._one_at_a_time:
                await asyncio.to_thread(region.memory.close)
        finally:
            self._regions.forget(region)
            del self._freeing[region]

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                await self.free_abandoned()
            except Exception:
                logger.exception("failed to free the regions of callers that seem gone")
