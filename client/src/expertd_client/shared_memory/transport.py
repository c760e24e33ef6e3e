"""Calls with tensors in shared memory."""

import time

from expertd_client.arenas import Holder, Lease
from expertd_client.calls import LayerCall
from expertd_client.deadline import Deadline
from expertd_client.directory import Directory, Wanted
from expertd_client.errors import ExpertError, InvalidRequestError
from expertd_client.http.transport import HttpTransport
from expertd_client.shared_memory.arena import (
    Closed,
    RegionArena,
    is_answer,
    is_unregistered,
    keep_memory,
    make_region,
    unregister,
)
from expertd_client.steps import Steps
from expertd_client.transport import TransportName

_CLOSE_SECONDS = 2.0
_TRY_SECONDS, _PAUSE_SECONDS = 0.1, 1.0  # to unregister, while a call that has its answer waits


class SharedMemoryTransport:
    """Calls over HTTP whose tensors lie in a region of shared memory, which grows with the calls."""

    name: TransportName = "shared_memory"

    def __init__(self, http: HttpTransport, max_connections: int) -> None:
        self._http = http
        self._closed: list[Closed] = []  # regions, to be unregistered
        self._next_try = 0.0  # when they may be, by time.monotonic
        self._directory = Directory(self.name, max_connections, self._make, by_model=False)

    def infer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        """Have the layer's output written to `call.output`."""
        yield from self._directory.answer(call, deadline, self._exchange)
        if self._closed and time.monotonic() >= self._next_try:  # the region has been replaced
            yield from unregister(self._http, self._closed, Deadline(_TRY_SECONDS))
            self._next_try = time.monotonic() + _PAUSE_SECONDS if self._closed else 0.0

    def close(self) -> Steps[None]:
        """Remove the memory now, or after the last call that uses it."""
        self._directory.close()
        yield from unregister(self._http, self._closed, Deadline(_CLOSE_SECONDS))
        keep_memory(self._closed)

    def _exchange(
        self, call: LayerCall, deadline: Deadline, lease: Lease[RegionArena], unanswered: list[int]
    ) -> Steps[bool]:
        arena = lease.arena
        unanswered.append(1)
        try:
            placed = arena.fill(call, lease.place)
            yield from self._http.infer_placed(call, placed, deadline)
            arena.fetch(call, lease.place)
            unanswered.clear()
        except ExpertError as error:
            if is_answer(error):
                unanswered.clear()
            if not isinstance(error, InvalidRequestError) or not is_unregistered(error):
                raise
            arena.lose()
            return False
        return True

    def _make(self, wanted: Wanted, holder: Holder[RegionArena]) -> Steps[RegionArena]:
        return make_region(self._http, wanted, self._closed)
