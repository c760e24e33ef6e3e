"""The way from an attention worker to the expert layers: submit hidden states of a slot, wait for the answer.

A worker has one request on the way for each slot, its micro-batch. `HttpExperts` does it with threads of the
client; another transport, such as a channel, is another class with these two methods.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from expertd_client import ExpertClient


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


def served_layers(client: ExpertClient, pool: ThreadPoolExecutor, count: int) -> Sequence[Experts]:
    """`count` layers: the server's, from the first again if it has fewer."""
    names = [status.name for status in client.models()]
    return [HttpExperts(client, names[layer % len(names)], pool) for layer in range(count)]
