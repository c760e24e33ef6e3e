"""A channel without copies, for a thread: the caller writes to the memory that the server reads."""

from types import TracebackType
from typing import Any

from expertd_client.channel.base import BaseChannel
from expertd_client.channel.slots import Slot, Ticket
from expertd_client.steps import run


class Channel(BaseChannel):
    """Slots that are written, submitted and waited for, in any order. For one thread.

    Made by ExpertClient.open_channel; closed by `close`, or at the end of a `with` block. Arrays of slots may
    be used afterwards, but the server does not see them any more.
    """

    def submit(
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
        """Have the server compute the first `num_tokens` rows of a slot, whose arrays it has until `wait`.

        If the slot's last request is late, it waits until the server is done with that.

        model        one of the channel's; may be left out if it has only one
        routed       topk_ids and topk_weights are given; else the layer's router chooses
        timeout      seconds until the answer must be there (default: the client's; math.inf: any time)
        priority     1 to 255: requests with a lower one are computed first; 0: the server's default
        synchronize  on a GPU, wait for the current stream first, so that everything written there is in
                     memory. False, if the caller knows that it is, saves 5 to 40 us

        Raises DeadlineError, InvalidRequestError, ServerUnreachableError.
        """
        ticket, late = self._begin(slot, num_tokens, model, routed, timeout, priority, synchronize)
        if not ticket.sequence:
            run(self._submit(ticket, late, synchronize))
        return ticket

    def wait(self, ticket: Ticket) -> Any:
        """The output [num_tokens, hidden_size] of a request, in its slot's memory.

        Raises InvalidRequestError, ServerBusyError, ServerUnreachableError; ExpertError if the step failed;
        DeadlineError, after which the slot is in use until the server is done with it.
        """
        return run(self._wait(ticket))

    def infer(self, slot: Slot, num_tokens: int, **options: Any) -> Any:
        """`submit` with the same options, then `wait`."""
        return self.wait(self.submit(slot, num_tokens, **options))

    def close(self) -> None:
        """Give the channel up. Requests in flight are not answered any more."""
        self._close()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
