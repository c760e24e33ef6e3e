"""A channel without copies, for a thread: the caller writes to the memory that the server reads."""

import time
from types import TracebackType
from typing import Any

from expertd_client.channel.base import BaseChannel
from expertd_client.channel.slots import Slot, Ticket
from expertd_client.deadline import Deadline


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
        routed: bool = False,
        timeout: float | None = None,
        priority: int = 0,
        synchronize: bool = True,
    ) -> Ticket:
        """Have the server compute the first `num_tokens` rows of a slot, whose arrays it has until `wait`.

        If the slot's last request is late, it waits until the server is done with that.

        routed       topk_ids and topk_weights are given; else the layer's router chooses
        timeout      seconds until the answer must be there (default: the client's; math.inf: any time)
        priority     1 to 255: requests with a lower one are computed first; 0: the server's default
        synchronize  on a GPU, wait for the current stream first, so that everything written there is in
                     memory. False, if the caller knows that it is, saves 5 to 40 us

        Raises DeadlineError, InvalidRequestError, ServerUnreachableError.
        """
        ticket, line, late = self._begin(slot, num_tokens, routed, timeout, priority)
        try:
            if late is not None and not late.is_done:
                self._settle(late, ticket.deadline)
            if synchronize and self._current_stream is not None:
                self._current_stream().synchronize()
            while (first := self._send(ticket, line)) is not None:
                self._settle(first, ticket.deadline)
        finally:
            if not ticket.sequence:
                slot.ticket = late
        return ticket

    def wait(self, ticket: Ticket) -> Any:
        """The output [num_tokens, hidden_size] of a request, in its slot's memory.

        Raises InvalidRequestError, ServerBusyError, ServerUnreachableError; ExpertError if the step failed;
        DeadlineError, after which the slot is in use until the server is done with it.
        """
        self._check(ticket)
        if not ticket.is_done:
            try:
                self._settle(ticket, ticket.deadline)
            except BaseException:
                ticket.is_late = True
                raise
        return self._output(ticket)

    def infer(
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
        ticket = self.submit(
            slot, num_tokens, routed=routed, timeout=timeout, priority=priority, synchronize=synchronize
        )
        return self.wait(ticket)

    def close(self) -> None:
        """Give the channel up. Requests in flight are not answered any more."""
        self._close()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_current_stream"):  # it was made
            self._close()

    def _settle(self, ticket: Ticket, deadline: Deadline) -> None:
        """Wait for an answer, and keep what it says. Raises ServerUnreachableError, DeadlineError."""
        link, sequence = self._link, ticket.sequence
        if not link.is_answered(sequence):
            began = time.perf_counter()
            if not link.spin(sequence):
                self._sleep(sequence, deadline)
            link.took(time.perf_counter() - began)
        self._take(ticket)

    def _sleep(self, sequence: int, deadline: Deadline) -> None:
        link = self._link
        while True:
            if link.is_open:
                link.clear()
            if link.is_answered(sequence):
                return
            if not link.is_open:
                raise link.closed_error()
            link.sleep(deadline.check())
