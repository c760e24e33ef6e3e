"""What channels without copies have for threads and for event loops: all but the waiting."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from expertd_client.calls import checked_priority
from expertd_client.channel.enqueueing import Enqueuer
from expertd_client.channel.layout import CODES, MODEL, REQUEST, ROUTED
from expertd_client.channel.opening import Opened
from expertd_client.channel.slots import Shapes, Slot, Ticket
from expertd_client.channel.waiting import AnswerWait, Waiters
from expertd_client.deadline import Deadline
from expertd_client.errors import ExpertError, InvalidRequestError, ServerUnreachableError
from expertd_client.retries import is_lost, with_retries
from expertd_client.semaphore import Semaphore
from expertd_client.steps import Steps

if TYPE_CHECKING:
    import torch

_FOREVER_SECONDS = 2**64 / 1e6  # more than a request line can say
_MAX_KEPT = 64  # request lines, of a slot
_kept: list[object] = []  # a GPU's memory that a step may still use


class Made(NamedTuple):
    """What a channel is made of.

    models    -> their numbers, as request lines have them
    deadline  requests have as much time as it had
    reopen    opens it again after its server has gone, with the same memory
    """

    opened: Opened
    shapes: Shapes
    slots: list[Slot]
    models: Mapping[str, bytes]
    deadline: Deadline
    reopen: Callable[[Opened, Deadline], Steps[Opened]]


class BaseChannel:
    """Slots, and requests in flight."""

    def __init__(self, made: Made) -> None:
        self.slots = made.slots
        self._made = made
        self._shapes = made.shapes
        self._own = frozenset(made.slots)
        self._gpu = made.opened.device
        self._enqueuer: Enqueuer | None = None  # once requests are enqueued on a stream; then all of them are
        self._current_stream = None if self._gpu is None else _current_stream(self._gpu)
        self._opening = Semaphore(1)  # one task at a time opens it again
        self._use(made.opened)

    @property
    def models(self) -> tuple[str, ...]:
        """The models that requests may be for."""
        return tuple(self._made.models)

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
        """Whether `wait` would return, or raise, at once; or begin to repeat a request that was lost."""
        link = ticket.waiters.link
        return ticket.is_done or not link.is_open or link.is_answered(ticket.sequence)

    def _begin(
        self,
        slot: Slot,
        num_tokens: int,
        model: str | None,
        routed: bool,
        timeout: float | None,
        priority: int,
        synchronize: bool,
    ) -> tuple[Ticket, Ticket | None]:
        """A request that takes a slot, sent if it can be at once, and the slot's late request."""
        if slot not in self._own:
            raise InvalidRequestError("slot: expected one of this channel, got one of another channel")
        if self._enqueuer is not None:
            raise InvalidRequestError("channel: expected requests by enqueue, as before, got submit")
        late = slot.ticket
        if late is not None and not late.is_late:
            got = "got one in use, not waited for"
            raise InvalidRequestError(f"slot {slot.index}: expected a free one, {got}")
        seconds = self._made.deadline.seconds if timeout is None else timeout
        flags = ROUTED if routed else 0
        line = slot.lines.get((num_tokens, flags, seconds, priority))
        if line is None:
            line = self._line(slot, num_tokens, flags, seconds, priority)
        deadline = Deadline(seconds, self._made.deadline.retry_seconds)
        ticket = slot.ticket = Ticket(slot, num_tokens, deadline, self._waiters, line + self._number(model))
        if late is None and not (synchronize and self._current_stream is not None):
            self._try(ticket)
        return ticket, late

    def _submit(self, ticket: Ticket, late: Ticket | None, synchronize: bool) -> Steps[None]:
        """Send a request that was not."""
        try:
            if synchronize and self._current_stream is not None:
                yield Drained(self._current_stream())
            yield from with_retries(lambda: self._send(ticket, late), 0, ticket.deadline)
        finally:
            if not ticket.sequence:
                ticket.slot.ticket = late

    def _wait(self, ticket: Ticket) -> Steps[Any]:
        self._check(ticket)
        if not ticket.is_done:
            try:
                yield from self._answer(ticket)
            except BaseException:
                ticket.is_late = not ticket.is_done
                if ticket.is_done and ticket.slot.ticket is ticket:
                    ticket.slot.ticket = None
                raise
            self._check(ticket)  # another task may have waited for it too
        ticket.slot.ticket = None
        if ticket.error is not None:
            raise ticket.error
        return ticket.slot.rows(ticket.num_tokens)

    def _answer(self, ticket: Ticket) -> Steps[None]:
        """Have a request answered, sent again if its server has lost it."""
        failed: ExpertError | None = None
        if ticket.sequence:
            try:
                if not ticket.waiters.link.is_answered(ticket.sequence):
                    yield AnswerWait(ticket.waiters, ticket.sequence, ticket.deadline)
                self._take(ticket, ticket.sequence)
                failed = ticket.error
                if failed is None or not is_lost(failed):
                    return
            except ServerUnreachableError as error:
                failed = error
        yield from with_retries(lambda: self._again(ticket), 0, ticket.deadline, failed)

    def _again(self, ticket: Ticket) -> Steps[None]:
        if ticket.is_done or ticket.is_lost:
            ticket.again()
        yield from self._send(ticket)
        yield from self._settle(ticket, ticket.deadline)
        if ticket.error is not None and is_lost(ticket.error):
            raise ticket.error

    def _send(self, ticket: Ticket, late: Ticket | None = None) -> Steps[None]:
        """Send a request unless it is sent, once the server is done with the slot's `late` one and has room.

        A channel that has ended is opened again.
        """
        if late is not None and late.sequence and not (late.is_done or late.is_lost):
            yield from self._settle(late, ticket.deadline)
        while not ticket.sequence:
            if not self._link.is_open:
                yield from self._reopen(ticket.deadline)
            if not self._try(ticket):
                first = self._tickets[self._link.sequence + 1 - self._link.num_slots]
                yield from self._settle(first, ticket.deadline)

    def _try(self, ticket: Ticket) -> bool:
        """Whether it could be sent at once."""
        if self._link.is_open and (sequence := self._link.send(ticket.line)):
            ticket.sequence, ticket.waiters = sequence, self._waiters
            self._tickets[sequence] = ticket
        return bool(ticket.sequence)

    def _settle(self, ticket: Ticket, deadline: Deadline) -> Steps[None]:
        """Wait for an answer, and keep what it says. Raises ServerUnreachableError, DeadlineError."""
        sequence = ticket.sequence
        if not ticket.waiters.link.is_answered(sequence):
            yield AnswerWait(ticket.waiters, sequence, deadline)
        self._take(ticket, sequence)

    def _take(self, ticket: Ticket, sequence: int) -> None:
        """Keep what an answer says that is there, unless another task has."""
        waiters = ticket.waiters
        if ticket.sequence != sequence or ticket.is_done:
            return
        if waiters is self._waiters:
            del self._tickets[sequence]
        ticket.is_done = True
        try:
            waiters.link.take_answer(sequence)
        except ExpertError as error:
            ticket.error = error
        waiters.taken(sequence)

    def _reopen(self, deadline: Deadline) -> Steps[None]:
        """Open the channel again, unless another task does. Raises ServerUnreachableError, if not allowed."""
        lost = self._link
        if lost.is_closed or not deadline.may_repeat():
            raise lost.closed_error()
        yield from self._opening.acquire(deadline)
        try:
            if self._link is lost:
                opened = yield from self._made.reopen(self._opened, deadline)
                if lost.is_closed:  # meanwhile, by its owner
                    opened.link.close()
                    raise lost.closed_error()
                self._waiters.close(is_lost=True)
                self._use(opened)
        finally:
            self._opening.release()

    def _use(self, opened: Opened) -> None:
        self._opened, self._link = opened, opened.link
        self._waiters = Waiters(opened.link)
        self._tickets: dict[int, Ticket] = {}  # in flight, by sequence

    def _check(self, ticket: Ticket) -> None:
        """Raises InvalidRequestError unless it can be waited for."""
        if ticket.slot.ticket is not ticket:
            raise InvalidRequestError("ticket: expected one that was not waited for, got one that was")
        if ticket.slot not in self._own:
            raise InvalidRequestError("ticket: expected one of this channel, got one of another channel")

    def __del__(self) -> None:
        if hasattr(self, "_waiters"):  # it was made
            self._close()

    def _close(self) -> None:
        # Also if the server has closed it: a step that it had begun goes on.
        answered = all(self._link.is_answered(sequence) for sequence in self._tickets)
        if self._enqueuer is not None:
            answered = self._enqueuer.close()
        if self._gpu is not None and not answered and not self._link.is_closed:
            _kept.append(self._gpu)  # freeing it under a step would be undefined
        self._waiters.close()

    def _number(self, model: str | None) -> bytes:
        models = self._made.models
        if model is None and len(models) == 1:
            (number,) = models.values()
            return number
        if model is None or model not in models:
            raise InvalidRequestError(f"model: expected {' or '.join(models):.200}, got {model!r}")
        return models[model]

    def _line(self, slot: Slot, num_tokens: int, flags: int, seconds: float, priority: int) -> bytes:
        shapes, where = self._shapes, self._shapes.layout
        start = slot.index * self._opened.sizes.place_bytes
        if not 0 <= num_tokens <= shapes.max_tokens:
            raise InvalidRequestError(f"num_tokens: expected 0 to {shapes.max_tokens}, got {num_tokens}")
        Deadline(seconds)  # checks them
        checked_priority(priority)
        line = REQUEST.pack(
            num_tokens,
            CODES[shapes.datatype],
            CODES[shapes.output_datatype],
            flags,
            0 if seconds >= _FOREVER_SECONDS else max(1, int(seconds * 1e6)),
            start + where.hidden_states,
            start + where.topk_ids,
            start + where.topk_weights,
            start + where.output,
            priority,
            0,
        )[: -MODEL.size]  # that of the model follows
        if len(slot.lines) >= _MAX_KEPT:
            slot.lines.clear()
        slot.lines[num_tokens, flags, seconds, priority] = line
        return line


@dataclass(slots=True)
class Drained:
    """Until a stream has done its work."""

    stream: "torch.cuda.Stream"

    def in_thread(self) -> None:
        """As Wait.in_thread."""
        self.stream.synchronize()

    async def in_loop(self) -> None:
        """As Wait.in_loop."""
        if not self.stream.query():
            await asyncio.to_thread(self.stream.synchronize)

    def is_over(self) -> bool:
        """As Wait.is_over: it is work, of a GPU."""
        return True


def _current_stream(data: "torch.Tensor") -> "Callable[[], torch.cuda.Stream]":
    """Gives the current stream of a tensor's GPU."""
    import torch

    index = data.device.index
    return lambda: torch.cuda.current_stream(index)
