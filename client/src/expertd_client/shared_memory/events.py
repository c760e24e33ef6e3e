"""Calls with tensors in shared memory, for asyncio."""

from expertd_client.arenas import Holder, Lease, Sizes
from expertd_client.calls import LayerCall
from expertd_client.deadline import Deadline
from expertd_client.directory import Directory, Wanted, need_of
from expertd_client.errors import ExpertError, InvalidRequestError
from expertd_client.http.events import AsyncHttpTransport
from expertd_client.leasing import take_place_async
from expertd_client.shared_memory.arena import (
    RegionArena,
    is_answer,
    is_unregistered,
    make_region,
    unregister,
)
from expertd_client.steps import Steps, run_async
from expertd_client.transport import TransportName


class AsyncSharedMemoryTransport:
    """SharedMemoryTransport for one event loop."""

    name: TransportName = "shared_memory"

    def __init__(self, http: AsyncHttpTransport, max_connections: int) -> None:
        self._http = http
        self._closed: list[str] = []  # names of regions, to be unregistered
        self._directory: Directory[RegionArena] = Directory(
            self.name, max_connections, self._make, by_model=False
        )

    async def infer(self, call: LayerCall, deadline: Deadline) -> None:
        """Have the layer's output written to `call.output`."""
        while not await self._attempt(call, deadline):
            pass
        if self._closed:  # the region has been replaced
            await run_async(unregister(self._closed), self._http, deadline)

    def close(self) -> None:
        """Remove the memory now, or after the last call that uses it."""
        self._directory.close()

    async def _attempt(self, call: LayerCall, deadline: Deadline) -> bool:
        """Whether the call has been answered; if not, it needs another region."""
        directory = self._directory
        gpu, need = directory.gpu_for(call), need_of(call)
        holder = directory.holder(call.model, gpu)

        async def open_arena(sizes: Sizes) -> RegionArena | None:
            wanted = Wanted(call.model, need, sizes, gpu, deadline)
            return await run_async(directory.open(wanted), self._http, deadline)

        holder.enter()
        try:
            lease = await take_place_async(holder, need, deadline, open_arena)
            return lease is not None and await self._exchange(holder, lease, call, deadline)
        finally:
            holder.leave()

    async def _exchange(
        self, holder: Holder[RegionArena], lease: Lease[RegionArena], call: LayerCall, deadline: Deadline
    ) -> bool:
        arena, unanswered = lease.arena, [1]
        try:
            placed = arena.fill(call, lease.place)
            await self._http.infer_placed(call, placed, deadline)
            arena.fetch(call, lease.place)
            unanswered.clear()
        except ExpertError as error:
            if is_answer(error):
                unanswered.clear()
            if not isinstance(error, InvalidRequestError) or not is_unregistered(error):
                raise
            arena.lose()
            return False
        finally:
            holder.give_back(lease, *unanswered)
        return True

    def _make(self, wanted: Wanted, holder: Holder[RegionArena]) -> Steps[RegionArena]:
        return make_region(wanted, self._closed)
