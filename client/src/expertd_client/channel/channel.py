"""A channel without copies, for a thread: the caller writes to the memory that the server reads."""

import math
from collections.abc import Callable
from types import TracebackType
from typing import Any

from expertd_client.channel.base import BaseChannel
from expertd_client.channel.enqueueing import Enqueued, Enqueuer
from expertd_client.channel.layout import ON_STREAM, ROUTED
from expertd_client.channel.slots import Slot, Ticket
from expertd_client.channel.stream import CallerStream, CudaStream
from expertd_client.errors import ExpertError, InvalidRequestError
from expertd_client.steps import run


class Channel(BaseChannel):
    """Slots that are written, submitted and waited for, in any order. For one thread.

    Made by ExpertClient.open_channel; closed by `close`, or at the end of a `with` block. Arrays of slots may
    be used afterwards, but the server does not see them any more.

    on_failure  is called with the error, on another thread, if an enqueued request fails for good, before the
                stream goes on with NaN; to be set before the first `enqueue`
    """

    on_failure: Callable[[ExpertError], object] = staticmethod(lambda error: None)

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

    def enqueue(
        self,
        slot: Slot,
        num_tokens: int,
        *,
        model: str | None = None,
        routed: bool = False,
        priority: int = 0,
    ) -> Enqueued:
        """`submit` as work of torch's current stream, in a GPU's memory: this thread waits for nothing.

        The server computes the slot's first rows when the stream has done what was enqueued before. Requests
        are made in the order of these calls, and may be many: a slot may be used for the next one after
        `enqueue_wait`. Only if the server has all the requests that it has room for, this thread waits.

        A request has as many seconds as the channel's timeout, from when the stream gets to it. A lost server
        is waited for, as by `submit`, while the stream waits. If a request fails for good, `on_failure` is
        called, this output and those of later requests are NaN, and the next call raises the error.

        Raises InvalidRequestError for a channel in the host's memory, or a stream that captures a graph;
        TransportUnavailableError, if the GPU or its driver cannot do this; ExpertError, if an earlier request
        has failed.
        """
        enqueuer = self._enqueuer or self._begin_to_enqueue()
        if slot not in self._own:
            raise InvalidRequestError("slot: expected one of this channel, got one of another channel")
        if slot.enqueued is not None:
            raise InvalidRequestError(
                f"slot {slot.index}: expected a free one, got one in use, not waited for"
            )
        flags = ON_STREAM | ROUTED if routed else ON_STREAM
        key = num_tokens, flags, model, priority
        line = slot.lines.get(key)
        if line is None:
            line = self._line(slot, num_tokens, flags, math.inf, priority) + self._number(model)
            slot.lines[key] = line
        slot.enqueued = request = enqueuer.enqueue(slot, num_tokens, line)
        return request

    def enqueue_wait(self, request: Enqueued) -> Any:
        """Have torch's current stream wait for a request; its output [num_tokens, hidden_size].

        It is for that stream, in the slot's memory, which the slot's next request may overwrite.
        """
        if self._enqueuer is None or request.slot.enqueued is not request:
            raise InvalidRequestError("request: expected one that was not waited for, got one that was")
        request.slot.enqueued = None
        self._enqueuer.wait(request)
        return request.slot.rows(request.num_tokens)

    def _begin_to_enqueue(self) -> Enqueuer:
        if any(slot.ticket is not None for slot in self.slots):
            raise InvalidRequestError("channel: expected no request of submit in flight, got one")
        made = self._made
        self._enqueuer = Enqueuer(
            self._opened, stream_of(self._gpu), made.reopen, made.deadline, self.on_failure
        )
        return self._enqueuer

    def close(self) -> None:
        """Give the channel up. Requests in flight are not answered any more.

        What is enqueued is waited for, for five seconds; then its outputs are NaN, and the stream goes on.
        """
        self._close()

    def __enter__(self) -> "Channel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def stream_of(memory: Any) -> CallerStream:
    """For requests of tensors in a GPU's memory; None: the host's, which cannot be."""
    if memory is None:
        raise InvalidRequestError("device: expected a GPU for enqueue, got the host")
    return CudaStream(memory.device)
