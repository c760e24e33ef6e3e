"""A channel without copies, for an event loop."""

from types import TracebackType
from typing import Any

from expertd_client.channel.base import BaseChannel
from expertd_client.channel.slots import Slot, Ticket
from expertd_client.steps import run_async


class AsyncChannel(BaseChannel):
    """Channel for the tasks of one event loop, which may have requests in different slots at the same time.

    Made by AsyncExpertClient.open_channel; closed by `close`, or at the end of an `async with` block.
    """

    async def submit(
        self,
        slot: Slot,
        num_tokens: int,
        *,
        model: str | None = None,
        routed: bool = False,
        timeout: float | None = None,
        priority: int = 0,
        synchronize: bool = True,
    ) -> Ticket:
        """As Channel.submit. It waits only on a GPU, or if the answer of an earlier request is overdue."""
        ticket, late = self._begin(slot, num_tokens, model, routed, timeout, priority, synchronize)
        if not ticket.sequence:
            await run_async(self._submit(ticket, late, synchronize))
        return ticket

    async def wait(self, ticket: Ticket) -> Any:
        """As Channel.wait. If the task is cancelled, the slot is in use until the server is done with it."""
        return await run_async(self._wait(ticket))

    async def infer(self, slot: Slot, num_tokens: int, **options: Any) -> Any:
        """`submit` with the same options, then `wait`."""
        return await self.wait(await self.submit(slot, num_tokens, **options))

    async def close(self) -> None:
        """As Channel.close. Tasks that wait get ServerUnreachableError."""
        self._close()

    async def __aenter__(self) -> "AsyncChannel":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
