"""Calls over channels, for threads."""

import threading
import time

from expertd_client.arenas import Holder, Lease, Sizes
from expertd_client.calls import LayerCall
from expertd_client.channel.arena import ChannelArena
from expertd_client.channel.opening import Opened, open_largest
from expertd_client.channel.waiting import Waiters
from expertd_client.deadline import Deadline
from expertd_client.directory import Directory, Wanted, need_of
from expertd_client.errors import InvalidRequestError, ServerBusyError
from expertd_client.leasing import take_place
from expertd_client.retries import delay_before_retry
from expertd_client.steps import Asker, Steps, run
from expertd_client.transport import TransportName

_FULL_SECONDS = 0.5e-3


class _Arena(ChannelArena):
    """A channel that threads share."""

    def __init__(self, opened: Opened, holder: "Holder[_Arena]") -> None:
        super().__init__(opened)
        self.sending = threading.Lock()
        self.waiters = Waiters(self.link)


def _make(wanted: Wanted, holder: Holder[_Arena]) -> Steps[_Arena]:
    opened = yield from open_largest(wanted)
    return _Arena(opened, holder)


class ChannelTransport:
    """Calls over a channel of each model, which is opened by its first call and grows with the calls.

    At most `max_connections` calls of a model run at a time, and few if they are large; others wait.
    """

    name: TransportName = "channel"

    def __init__(self, http: Asker, max_connections: int, max_retries: int) -> None:
        self._http = http
        self._max_retries = max_retries
        self._directory = Directory(self.name, max_connections, _make, by_model=True)

    def infer(self, call: LayerCall, deadline: Deadline) -> None:
        """Have the layer's output written to `call.output`."""
        retries = 0
        while True:
            try:
                while not self._attempt(call, deadline):
                    pass
                return
            except ServerBusyError as busy:
                delay = delay_before_retry(busy, retries, self._max_retries, deadline)
            retries += 1
            time.sleep(delay)

    def close(self) -> None:
        """Close channels now, or after the last call of each."""
        self._directory.close()

    def _attempt(self, call: LayerCall, deadline: Deadline) -> bool:
        """Whether the call has been answered; if not, it needs another kind of memory."""
        directory = self._directory
        gpu, need = directory.gpu_for(call), need_of(call)
        holder = directory.holder(call.model, gpu)

        def open_arena(sizes: Sizes) -> _Arena | None:
            wanted = Wanted(call.model, need, sizes, gpu, deadline)
            return run(directory.open(wanted), self._http, deadline)

        holder.enter()
        try:
            lease = take_place(
                holder,
                need,
                deadline,
                lambda sizes: run(
                    directory.open(Wanted(call.model, need, sizes, gpu, deadline)), self._http, deadline
                ),
            )
            if lease is None:
                return False
            unanswered: list[int] = []
            try:
                _exchange(lease, call, deadline, unanswered)
            finally:
                holder.give_back(lease, *unanswered)
        except InvalidRequestError as error:
            if not directory.learn(error, call, gpu):
                raise
            return False
        finally:
            holder.leave()
        return True


def _exchange(lease: Lease[_Arena], call: LayerCall, deadline: Deadline, unanswered: list[int]) -> None:
    """Send a call and receive its answer; `unanswered` has its number until that is there."""
    arena = lease.arena
    line = arena.fill(call, lease.place, deadline)
    while not (sequence := _send(arena, line, unanswered)):
        deadline.check()
        time.sleep(_FULL_SECONDS)  # an answer is overdue whose slot is next, which hardly ever happens
    arena.waiters.wait(sequence, deadline, spins=arena.users == 1)
    unanswered.clear()
    arena.link.take_answer(sequence)
    arena.fetch(call, lease.place)


def _send(arena: _Arena, line: bytes, unanswered: list[int]) -> int:
    with arena.sending:
        sequence = arena.link.send(line)
        if sequence:
            unanswered.append(sequence)
    return sequence
