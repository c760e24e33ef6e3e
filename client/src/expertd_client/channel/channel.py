"""A channel without copies: the caller writes to the memory that the server reads."""

import math
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from expertd_client.channel.layout import CODES, REQUEST, ROUTED
from expertd_client.channel.opening import Opened
from expertd_client.channel.slots import Shapes, Slot, Ticket
from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError, InvalidRequestError

_MAX_KEPT = 64  # request lines, of a slot
_kept: list[object] = []  # a GPU's memory that a step may still use


class Channel:
    """Slots that are written, submitted and waited for, in any order. For one thread.

    Made by ExpertClient.open_channel; closed by `close`, or at the end of a `with` block. Arrays of slots may
    be used afterwards, but the server does not see them any more.
    """

    def __init__(self, opened: Opened, shapes: Shapes, slots: list[Slot], timeout: float) -> None:
        self.slots = slots
        self._link = opened.link
        self._shapes = shapes
        self._timeout = timeout
        self._slot_bytes = opened.sizes.place_bytes
        self._tickets: dict[int, Ticket] = {}  # in flight, by sequence
        self._gpu = opened.device
        self._synchronize = None if opened.device is None else _synchronizer(opened.device)

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a request."""
        return self._shapes.max_tokens

    @property
    def hidden_size(self) -> int:
        """Columns of hidden_states and output."""
        return self._shapes.hidden_size

    @property
    def top_k(self) -> int:
        """Columns of topk_ids and topk_weights."""
        return self._shapes.top_k

    def submit(
        self,
        slot: Slot,
        num_tokens: int,
        *,
        routed: bool = False,
        timeout: float | None = None,
        synchronize: bool = True,
    ) -> Ticket:
        """Have the server compute the first `num_tokens` rows of a slot, whose arrays it has until `wait`.

        routed       topk_ids and topk_weights are given; else the layer's router chooses
        timeout      seconds until the answer must be there (default: the client's; math.inf: any time)
        synchronize  on a GPU, wait for the current stream first, so that everything written there is in
                     memory. False, if the caller knows that it is, saves 5 to 40 us

        Raises InvalidRequestError, ServerUnreachableError.
        """
        if slot.ticket is not None:
            self._end_late(slot)
        seconds = self._timeout if timeout is None else timeout
        line = slot.lines.get((num_tokens, routed, seconds))
        if line is None:
            line = self._line(slot, num_tokens, routed, seconds)
        if synchronize and self._synchronize is not None:
            self._synchronize()
        link = self._link
        while not (sequence := link.send(line)):
            self._settle(self._tickets[link.sequence + 1 - link.num_slots])
        ticket = Ticket(slot, num_tokens, Deadline(seconds), sequence, link)
        slot.ticket = self._tickets[sequence] = ticket
        return ticket

    def wait(self, ticket: Ticket) -> Any:
        """The output [num_tokens, hidden_size] of a request, in its slot's memory.

        Raises InvalidRequestError, ServerBusyError, ServerUnreachableError; ExpertError if the step failed;
        DeadlineError, after which the slot is in use until the server is done with it.
        """
        slot = ticket.slot
        if slot.ticket is not ticket:
            raise InvalidRequestError("ticket: expected one that was not waited for, got one that was")
        if not ticket.is_done:
            self._settle(ticket)
        slot.ticket = None
        if ticket.error is not None:
            raise ticket.error
        return slot.rows(ticket.num_tokens)

    def is_answered(self, ticket: Ticket) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return ticket.is_done or self._link.is_answered(ticket.sequence) or not self._link.is_open

    def close(self) -> None:
        """Give the channel up. Requests in flight are not answered any more."""
        if self._gpu is not None and any(not self.is_answered(ticket) for ticket in self._tickets.values()):
            _kept.append(self._gpu)  # freeing it under a step would be undefined
        self._link.close()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _settle(self, ticket: Ticket) -> None:
        """Wait for an answer, and keep what it says. Raises ServerUnreachableError, DeadlineError."""
        link, sequence = self._link, ticket.sequence
        if not link.is_answered(sequence):
            began = time.perf_counter()
            if not link.spin(sequence):
                self._sleep(ticket)
            link.took(time.perf_counter() - began)
        del self._tickets[sequence]
        ticket.is_done = True
        try:
            link.take_answer(sequence)
        except ExpertError as error:
            ticket.error = error

    def _sleep(self, ticket: Ticket) -> None:
        link = self._link
        while True:
            link.clear()
            if link.is_answered(ticket.sequence):
                return
            if not link.is_open:
                raise link.closed_error()
            left = ticket.deadline.remaining()
            if left <= 0:
                ticket.is_late = True
                raise ticket.deadline.error()
            link.sleep(left)

    def _end_late(self, slot: Slot) -> None:
        """Make a slot free whose request was answered too late. Raises InvalidRequestError."""
        ticket = slot.ticket
        if ticket is None or not ticket.is_late or not self.is_answered(ticket):
            state = "answered late" if ticket is not None and ticket.is_late else "not waited for"
            raise InvalidRequestError(f"slot {slot.index}: expected a free one, got one in use, {state}")
        if not ticket.is_done:
            self._link.drop_answer(ticket.sequence)
            del self._tickets[ticket.sequence]
        slot.ticket = None

    def _line(self, slot: Slot, num_tokens: int, routed: bool, seconds: float) -> bytes:
        shapes, where, start = self._shapes, self._shapes.layout, slot.index * self._slot_bytes
        if not 0 <= num_tokens <= shapes.max_tokens:
            raise InvalidRequestError(f"num_tokens: expected 0 to {shapes.max_tokens}, got {num_tokens}")
        Deadline(seconds)  # checks them
        line = REQUEST.pack(
            num_tokens,
            CODES[shapes.datatype],
            CODES[shapes.output_datatype],
            ROUTED if routed else 0,
            0 if math.isinf(seconds) else max(1, int(seconds * 1e6)),
            start + where.hidden_states,
            start + where.topk_ids,
            start + where.topk_weights,
            start + where.output,
            0,
        )
        if len(slot.lines) >= _MAX_KEPT:
            slot.lines.clear()
        slot.lines[num_tokens, routed, seconds] = line
        return line


def _synchronizer(data: Any) -> Callable[[], None]:
    """Waits for the current stream of a tensor's GPU."""
    import torch

    index = data.device.index
    return lambda: torch.cuda.current_stream(index).synchronize()
