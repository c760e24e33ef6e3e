"""Calls over channels."""

from expertd_client.arenas import Holder, Lease
from expertd_client.calls import LayerCall
from expertd_client.channel.arena import ChannelArena
from expertd_client.channel.opening import open_largest
from expertd_client.channel.waiting import AnswerWait
from expertd_client.deadline import Deadline
from expertd_client.directory import GROWTH_SECONDS, Directory, Wanted
from expertd_client.retries import with_retries
from expertd_client.steps import Sleep, Steps
from expertd_client.transport import Asker, TransportName

_FULL_SECONDS = 0.5e-3
_NIXL_GROWTH_SECONDS = 10.0  # as GROWTH_SECONDS: two processes start for a channel over NIXL


class ChannelTransport:
    """Calls over a channel of each model, which is opened by its first call and grows with the calls.

    At most `max_connections` calls of a model run at a time, and few if they are large; others wait. With
    `over_nixl` its servers may be on other machines, and tensors of GPUs pass through memory of the host.
    """

    def __init__(self, http: Asker, max_connections: int, max_retries: int, over_nixl: bool = False) -> None:
        self.name: TransportName = "nixl" if over_nixl else "channel"
        self._http = http
        self._max_retries = max_retries
        self._over_nixl = over_nixl
        growth_seconds = _NIXL_GROWTH_SECONDS if over_nixl else GROWTH_SECONDS
        self._directory = Directory(max_connections, self._make, growth_seconds, on_host=over_nixl)

    def infer(self, call: LayerCall, deadline: Deadline) -> Steps[None]:
        """Have the layer's output written to `call.output`."""
        return with_retries(
            lambda: self._directory.answer(call, deadline, _exchange), self._max_retries, deadline
        )

    def break_off(self) -> None:
        """End the channels, from any thread: calls that wait raise ServerUnreachableError."""
        self._directory.break_off()

    def close(self) -> Steps[None]:
        """Close channels now, or after the last call of each."""
        self._directory.close()
        yield from ()

    def _make(self, wanted: Wanted, holder: Holder[ChannelArena]) -> Steps[ChannelArena]:
        opened = yield from open_largest(self._http, wanted, self._over_nixl)
        return ChannelArena(opened, holder)


def _exchange(
    call: LayerCall, deadline: Deadline, lease: Lease[ChannelArena], unanswered: list[int]
) -> Steps[bool]:
    """Send a call and receive its answer; `unanswered` has its number until that is there."""
    arena = lease.arena
    line = arena.fill(call, lease.place, deadline)
    while not (sequence := _send(arena, line, unanswered)):
        yield Sleep(_FULL_SECONDS, deadline)  # an answer is overdue whose slot is next: hardly ever
        if not arena.holder.reclaim(arena):  # it may be that of a caller that has gone
            raise arena.link.closed_error()
    yield AnswerWait(arena.waiters, sequence, deadline, spins=arena.users == 1)  # no other thread waits
    unanswered.clear()
    arena.link.take_answer(sequence)
    arena.fetch(call, lease.place)
    return True


def _send(arena: ChannelArena, line: bytes, unanswered: list[int]) -> int:
    with arena.sending:
        sequence = arena.link.send(line)
        if sequence:
            unanswered.append(sequence)
    return sequence
