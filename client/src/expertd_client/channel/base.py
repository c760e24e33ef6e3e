"""What channels without copies have for threads and for event loops: all but the waiting."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from expertd_client.calls import checked_priority
from expertd_client.channel.layout import CODES, REQUEST, ROUTED
from expertd_client.channel.opening import Opened
from expertd_client.channel.slots import Shapes, Slot, Ticket
from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError, InvalidRequestError

if TYPE_CHECKING:
    import torch

_FOREVER_SECONDS = 2**64 / 1e6  # more than a request line can say
_MAX_KEPT = 64  # request lines, of a slot
_kept: list[object] = []  # a GPU's memory that a step may still use


class BaseChannel:
    """Slots, and requests in flight."""

    def __init__(self, opened: Opened, shapes: Shapes, slots: list[Slot], timeout: float) -> None:
        self.slots = slots
        self._link = opened.link
        self._shapes = shapes
        self._timeout = timeout
        self._slot_bytes = opened.sizes.place_bytes
        self._own = frozenset(slots)
        self._tickets: dict[int, Ticket] = {}  # in flight, by sequence
        self._gpu = opened.device
        self._current_stream = None if opened.device is None else _current_stream(opened.device)

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

    def is_answered(self, ticket: Ticket) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return ticket.is_done or self._link.is_answered(ticket.sequence) or not self._link.is_open

    def _begin(
        self, slot: Slot, num_tokens: int, routed: bool, timeout: float | None, priority: int
    ) -> tuple[Ticket, bytes, Ticket | None]:
        """A request that takes a slot, its line, and the slot's late request. Raises InvalidRequestError."""
        if slot not in self._own:
            raise InvalidRequestError("slot: expected one of this channel, got one of another channel")
        late = slot.ticket
        if late is not None and not late.is_late:
            got = "got one in use, not waited for"
            raise InvalidRequestError(f"slot {slot.index}: expected a free one, {got}")
        seconds = self._timeout if timeout is None else timeout
        line = slot.lines.get((num_tokens, routed, seconds, priority))
        if line is None:
            line = self._line(slot, num_tokens, routed, seconds, priority)
        ticket = slot.ticket = Ticket(slot, num_tokens, Deadline(seconds), self._link)
        return ticket, line, late

    def _send(self, ticket: Ticket, line: bytes) -> Ticket | None:
        """Send a request; if it cannot be yet, the one whose answer must be taken first."""
        link = self._link
        sequence = link.send(line)
        if not sequence:
            return self._tickets[link.sequence + 1 - link.num_slots]
        ticket.sequence = sequence
        self._tickets[sequence] = ticket
        return None

    def _check(self, ticket: Ticket) -> None:
        """Raises InvalidRequestError unless it can be waited for."""
        if ticket.slot.ticket is not ticket:
            raise InvalidRequestError("ticket: expected one that was not waited for, got one that was")
        if ticket.slot not in self._own:
            raise InvalidRequestError("ticket: expected one of this channel, got one of another channel")

    def _take(self, ticket: Ticket) -> None:
        """Keep what the answer says, which is there."""
        del self._tickets[ticket.sequence]
        ticket.is_done = True
        try:
            self._link.take_answer(ticket.sequence)
        except ExpertError as error:
            ticket.error = error

    def _output(self, ticket: Ticket) -> Any:
        """The output of a request whose answer was taken; its slot is free again. Raises ExpertError."""
        ticket.slot.ticket = None
        if ticket.error is not None:
            raise ticket.error
        return ticket.slot.rows(ticket.num_tokens)

    def _close(self) -> None:
        # Also if the server has closed it: a step that it had begun goes on.
        answered = all(self._link.is_answered(sequence) for sequence in self._tickets)
        if self._gpu is not None and not answered and not self._link.is_closed:
            _kept.append(self._gpu)  # freeing it under a step would be undefined
        self._link.close()

    def _line(self, slot: Slot, num_tokens: int, routed: bool, seconds: float, priority: int) -> bytes:
        shapes, where, start = self._shapes, self._shapes.layout, slot.index * self._slot_bytes
        if not 0 <= num_tokens <= shapes.max_tokens:
            raise InvalidRequestError(f"num_tokens: expected 0 to {shapes.max_tokens}, got {num_tokens}")
        Deadline(seconds)  # checks them
        checked_priority(priority)
        line = REQUEST.pack(
            num_tokens,
            CODES[shapes.datatype],
            CODES[shapes.output_datatype],
            ROUTED if routed else 0,
            0 if seconds >= _FOREVER_SECONDS else max(1, int(seconds * 1e6)),
            start + where.hidden_states,
            start + where.topk_ids,
            start + where.topk_weights,
            start + where.output,
            priority,
        )
        if len(slot.lines) >= _MAX_KEPT:
            slot.lines.clear()
        slot.lines[num_tokens, routed, seconds, priority] = line
        return line


def _current_stream(data: "torch.Tensor") -> "Callable[[], torch.cuda.Stream]":
    """Gives the current stream of a tensor's GPU."""
    import torch

    index = data.device.index
    return lambda: torch.cuda.current_stream(index)
