"""A channel without copies, for an event loop."""

import asyncio
from types import TracebackType
from typing import Any

from expertd_client.channel.base import BaseChannel
from expertd_client.channel.opening import Opened
from expertd_client.channel.slots import Shapes, Slot, Ticket
from expertd_client.channel.waiting import TaskWaiters
from expertd_client.deadline import Deadline


class AsyncChannel(BaseChannel):
    """Channel for the tasks of one event loop, which may have requests in different slots at the same time.

    Made by AsyncExpertClient.open_channel; closed by `close`, or at the end of an `async with` block.
    """

    def __init__(self, opened: Opened, shapes: Shapes, slots: list[Slot], timeout: float) -> None:
        super().__init__(opened, shapes, slots, timeout)
        self._waiters = TaskWaiters(self._link)

    async def submit(
        self,
        slot: Slot,
        num_tokens: int,
        *,
        routed: bool = False,
        timeout: float | None = None,
        priority: int = 0,
        synchronize: bool = True,
    ) -> Ticket:
        """As Channel.submit. It waits only on a GPU, or if the answer of an earlier request is overdue."""
        ticket, line, late = self._begin(slot, num_tokens, routed, timeout, priority)
        try:
            if late is not None and not late.is_done:
                await self._settle(late, ticket.deadline)
            if synchronize and self._current_stream is not None:
                stream = self._current_stream()
                if not stream.query():
                    await asyncio.to_thread(stream.synchronize)
            while (first := self._send(ticket, line)) is not None:
                await self._settle(first, ticket.deadline)
        finally:
            if not ticket.sequence:
                slot.ticket = late
        return ticket

    async def wait(self, ticket: Ticket) -> Any:
        """As Channel.wait. If the task is cancelled, the slot is in use until the server is done with it."""
        self._check(ticket)
        if not ticket.is_done:
            try:
                await self._settle(ticket, ticket.deadline)
            except BaseException:
                ticket.is_late = True
                raise
            self._check(ticket)  # another task may have waited for it too
        return self._output(ticket)

    async def infer(
        self,
        slot: Slot,
        num_tokens: int,
        *,
        routed: bool = False,
        timeout: float | None = None,
        priority: int = 0,
        synchronize: bool = True,
    ) -> Any:
        """`submit`, then `wait`."""
        ticket = await self.submit(
            slot, num_tokens, routed=routed, timeout=timeout, priority=priority, synchronize=synchronize
        )
        return await self.wait(ticket)

    async def close(self) -> None:
        """As Channel.close. Tasks that wait get ServerUnreachableError."""
        self._end()

    async def __aenter__(self) -> "AsyncChannel":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __del__(self) -> None:
        if hasattr(self, "_waiters"):  # the event loop has it, and with it the channel
            self._end()

    async def _settle(self, ticket: Ticket, deadline: Deadline) -> None:
        """Wait for an answer, and keep what it says. Raises ServerUnreachableError, DeadlineError."""
        await self._waiters.wait(ticket.sequence, deadline)
        if self._tickets.get(ticket.sequence) is ticket:  # else another task has done it
            self._take(ticket)
            self._waiters.taken(ticket.sequence)

    def _end(self) -> None:
        self._waiters.stop()
        self._close()
