"""Calls over channels, for asyncio."""

import asyncio

from expertd_client.arenas import Holder, Lease, Sizes
from expertd_client.calls import LayerCall
from expertd_client.channel.arena import ChannelArena
from expertd_client.channel.opening import Opened, open_largest
from expertd_client.channel.waiting import TaskWaiters
from expertd_client.deadline import Deadline
from expertd_client.directory import Directory, Wanted, need_of
from expertd_client.errors import InvalidRequestError, ServerBusyError
from expertd_client.leasing import take_place_async
from expertd_client.retries import delay_before_retry
from expertd_client.steps import AsyncAsker, Steps, run_async
from expertd_client.transport import TransportName

_FULL_SECONDS = 0.5e-3


class _Arena(ChannelArena):
    """A channel that the tasks of an event loop share."""

    def __init__(self, opened: Opened, holder: "Holder[_Arena]") -> None:
        super().__init__(opened)
        self._holder = holder
        self.waiters = TaskWaiters(self.link, self._wake)

    def is_usable(self) -> bool:
        """Whether the server still has it, and this is its event loop."""
        return self.waiters.loop is asyncio.get_running_loop() and super().is_usable()

    def close(self) -> None:
        """Close the channel."""
        self.waiters.stop()
        super().close()

    def _wake(self) -> None:
        if self.has_abandoned or not self.link.is_open:
            self._holder.wake()


def _make(wanted: Wanted, holder: Holder[_Arena]) -> Steps[_Arena]:
    opened = yield from open_largest(wanted)
    return _Arena(opened, holder)


class AsyncChannelTransport:
    """ChannelTransport for one event loop: answers are waited for by watching their pipes."""

    name: TransportName = "channel"

    def __init__(self, http: AsyncAsker, max_connections: int, max_retries: int) -> None:
        self._http = http
        self._max_retries = max_retries
        self._directory = Directory(self.name, max_connections, _make, by_model=True)

    async def infer(self, call: LayerCall, deadline: Deadline) -> None:
        """Have the layer's output written to `call.output`."""
        retries = 0
        while True:
            try:
                while not await self._attempt(call, deadline):
                    pass
                return
            except ServerBusyError as busy:
                delay = delay_before_retry(busy, retries, self._max_retries, deadline)
            retries += 1
            await asyncio.sleep(delay)

    def close(self) -> None:
        """Close channels now, or after the last call of each."""
        self._directory.close()

    async def _attempt(self, call: LayerCall, deadline: Deadline) -> bool:
        """Whether the call has been answered; if not, it needs another kind of memory."""
        directory = self._directory
        gpu, need = directory.gpu_for(call), need_of(call)
        holder = directory.holder(call.model, gpu)

        async def open_arena(sizes: Sizes) -> _Arena | None:
            return await run_async(
                directory.open(Wanted(call.model, need, sizes, gpu, deadline)), self._http, deadline
            )

        holder.enter()
        try:
            lease = await take_place_async(holder, need, deadline, open_arena)
            if lease is None:
                return False
            unanswered: list[int] = []
            try:
                await _exchange(lease, call, deadline, unanswered)
            finally:
                holder.give_back(lease, *unanswered)
        except InvalidRequestError as error:
            if not directory.learn(error, call, gpu):
                raise
            return False
        finally:
            holder.leave()
        return True


async def _exchange(lease: Lease[_Arena], call: LayerCall, deadline: Deadline, unanswered: list[int]) -> None:
    """Send a call and receive its answer; `unanswered` has its number until that is there."""
    arena = lease.arena
    line = arena.fill(call, lease.place, deadline)
    while not (sequence := arena.link.send(line)):
        deadline.check()
        await asyncio.sleep(_FULL_SECONDS)  # an answer is overdue whose slot is next
    unanswered.append(sequence)
    await arena.waiters.wait(sequence, deadline)
    unanswered.clear()
    arena.link.take_answer(sequence)
    arena.fetch(call, lease.place)
