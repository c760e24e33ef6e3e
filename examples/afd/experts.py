"""The way from an attention worker to the expert layers: submit hidden states of a slot, wait for the answer.

A worker has one request on the way for each slot, its micro-batch. `ChannelExperts` writes it to memory that
it shares with the server; `HttpExperts` works from anywhere, with threads of the client.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from expertd_client import Channel, ExpertClient, TransportUnavailableError

_DATATYPES = {torch.bfloat16: "BF16", torch.float32: "FP32"}


@dataclass
class Ticket:
    """A request on the way; `begin` and `end` in seconds of time.perf_counter, `end` once it is answered."""

    slot: int
    begin: float
    end: float = 0.0


class Experts(Protocol):
    """One expert layer. `hidden_states` and answers are [tokens, H], on the worker's device."""

    def submit(self, slot: int, hidden_states: Tensor) -> Ticket:
        """Send `hidden_states`, which the device has written, and return at once."""

    def wait(self, ticket: Ticket) -> Tensor:
        """The layer's output; valid until the next submit in the same slot. Raises ExpertError."""


class HttpExperts:
    """A layer by its name on the server. `pool` has a thread for each slot."""

    def __init__(self, client: ExpertClient, name: str, pool: ThreadPoolExecutor) -> None:
        self._client, self._name, self._pool = client, name, pool
        self._answers: dict[int, Future[Tensor]] = {}
        self._outputs: dict[int, Tensor] = {}

    def submit(self, slot: int, hidden_states: Tensor) -> Ticket:
        """As Experts.submit."""
        ticket = Ticket(slot, time.perf_counter())
        output = self._outputs.setdefault(slot, torch.empty_like(hidden_states))
        self._answers[slot] = self._pool.submit(self._infer, ticket, hidden_states, output)
        return ticket

    def wait(self, ticket: Ticket) -> Tensor:
        """As Experts.wait."""
        return self._answers.pop(ticket.slot).result()

    def _infer(self, ticket: Ticket, hidden_states: Tensor, output: Tensor) -> Tensor:
        # On a stream of its own: copies to and from the host must not wait for the other slot's attention.
        stream: torch.cuda.Stream | None = None
        if hidden_states.is_cuda:
            stream = torch.cuda.Stream(hidden_states.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            self._client.infer(self._name, hidden_states, out=output)
            if stream is not None:
                stream.synchronize()
        ticket.end = time.perf_counter()
        return output


class ChannelExperts:
    """A layer through a channel with a place for each slot."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._sent: dict[int, Any] = {}

    def submit(self, slot: int, hidden_states: Tensor) -> Ticket:
        """As Experts.submit."""
        place = self._channel.slots[slot]
        place.hidden_states[: len(hidden_states)].copy_(hidden_states)
        ticket = Ticket(slot, time.perf_counter())
        self._sent[slot] = self._channel.submit(place, len(hidden_states))
        return ticket

    def wait(self, ticket: Ticket) -> Tensor:
        """As Experts.wait."""
        sent = self._sent.pop(ticket.slot)
        output: Tensor = self._channel.wait(sent)
        ticket.end = ticket.begin + sent.queue_seconds + sent.compute_seconds  # perhaps before this call
        return output


def served_layers(
    client: ExpertClient, transport: str, count: int, like: Tensor, stack: ExitStack
) -> tuple[Sequence[Experts], str]:
    """`count` layers, the server's from the first again if it has fewer, and the transport that they take.

    `transport` may be "auto", which takes channels if the server has them. `like` is a micro-batch.
    """
    names = [status.name for status in client.models()]
    if transport in ("auto", "channel"):
        sizes: dict[str, Any] = {"num_slots": 2, "max_tokens": len(like), "datatype": _DATATYPES[like.dtype]}
        try:
            channels = [
                stack.enter_context(client.open_channel(name, device=like.device, **sizes))
                for name in names[:count]
            ]
            return [ChannelExperts(channels[layer % len(channels)]) for layer in range(count)], "channel"
        except TransportUnavailableError:
            if transport == "channel":
                raise
    pool = stack.enter_context(ThreadPoolExecutor(2))
    return [HttpExperts(client, names[layer % len(names)], pool) for layer in range(count)], client.transport
