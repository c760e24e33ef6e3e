"""Calls with tensors in shared memory, for threads."""

from contextlib import suppress

from expertd_client.arenas import Holder, Lease, Sizes
from expertd_client.calls import LayerCall
from expertd_client.deadline import Deadline
from expertd_client.directory import Directory, Wanted, need_of
from expertd_client.errors import ExpertError, InvalidRequestError
from expertd_client.http.blocking import HttpTransport
from expertd_client.leasing import take_place
from expertd_client.shared_memory.arena import (
    RegionArena,
    is_answer,
    is_unregistered,
    make_region,
    unregister,
)
from expertd_client.steps import Steps, run
from expertd_client.transport import TransportName

_CLOSE_SECONDS = 2.0


class SharedMemoryTransport:
    """Calls over HTTP whose tensors lie in a region of shared memory, which grows with the calls."""

    name: TransportName = "shared_memory"

    def __init__(self, http: HttpTransport, max_connections: int) -> None:
        self._http = http
        self._closed: list[str] = []  # names of regions, to be unregistered
        self._directory: Directory[RegionArena] = Directory(
            self.name, max_connections, self._make, by_model=False
        )

    def infer(self, call: LayerCall, deadline: Deadline) -> None:
        """Have the layer's output written to `call.output`."""
        while not self._attempt(call, deadline):
            pass
        if self._closed:  # the region has been replaced
            run(unregister(self._closed), self._http, deadline)

    def close(self) -> None:
        """Remove the memory now, or after the last call that uses it."""
        self._directory.close()
        steps = unregister(self._closed)
        with suppress(ExpertError):
            run(steps, self._http, Deadline(_CLOSE_SECONDS))

    def _attempt(self, call: LayerCall, deadline: Deadline) -> bool:
        """Whether the call has been answered; if not, it needs another region."""
        directory = self._directory
        gpu, need = directory.gpu_for(call), need_of(call)
        holder = directory.holder(call.model, gpu)

        def open_arena(sizes: Sizes) -> RegionArena | None:
            wanted = Wanted(call.model, need, sizes, gpu, deadline)
            return run(directory.open(wanted), self._http, deadline)

        holder.enter()
        try:
            lease = take_place(holder, need, deadline, open_arena)
            return lease is not None and self._exchange(holder, lease, call, deadline)
        finally:
            holder.leave()

    def _exchange(
        self, holder: Holder[RegionArena], lease: Lease[RegionArena], call: LayerCall, deadline: Deadline
    ) -> bool:
        arena, unanswered = lease.arena, [1]
        try:
            placed = arena.fill(call, lease.place)
            self._http.infer_placed(call, placed, deadline)
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
