"""The attention worker: every layer's attention here, its experts elsewhere, two micro-batches in turn."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from examples.afd.experts import Experts, Ticket
from examples.afd.intervals import Interval

SLOTS = "AB"
_HEAD = 64


@dataclass(frozen=True)
class AttentionSizes:
    """A micro-batch has `tokens` sequences, each one token; every sequence has `context` cached ones."""

    hidden_size: int
    tokens: int
    context: int
    heads: int = 16


class Attention(torch.nn.Module):
    """A stand-in: one token of each sequence attends to random keys and values, shared by all heads."""

    def __init__(self, sizes: AttentionSizes, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator(device).manual_seed(0)
        self._heads = sizes.heads

        def normal(*size: int) -> Tensor:
            made = torch.empty(size, device=device, dtype=dtype)
            return made.normal_(0, size[-1] ** -0.5, generator=generator)

        self._query = normal(sizes.heads * _HEAD, sizes.hidden_size)
        self._output = normal(sizes.hidden_size, sizes.heads * _HEAD)
        self._keys, self._values = (normal(sizes.tokens, sizes.context, _HEAD) for _ in range(2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, H], with the residual, for hidden_states [tokens, H]."""
        query = (norm(hidden_states) @ self._query.t()).view(-1, self._heads, _HEAD)
        attended = scaled_dot_product_attention(query, self._keys, self._values)
        return hidden_states + attended.flatten(1) @ self._output.t()


def norm(hidden_states: Tensor) -> Tensor:
    """Before attention and before experts, as in a decoder layer."""
    return rms_norm(hidden_states, hidden_states.shape[-1:])


class Worker:
    """Runs micro-batches A and B through all layers; `intervals` has when what ran, of the latest run."""

    def __init__(self, attention: Attention, experts: Sequence[Experts]) -> None:
        self._attention, self._experts = attention, experts
        self.intervals: list[Interval] = []

    @torch.no_grad()
    def run(self, batches: Sequence[Tensor], pingpong: bool) -> list[Tensor]:
        """The outputs [tokens, H] of two micro-batches.

        Both orders compute the same. With `pingpong`, a micro-batch's experts are waited for only after the
        other one's attention; without it, at once, so that nothing runs at the same time.
        """
        self.intervals = []
        hidden, tickets = list(batches), dict[int, Ticket]()
        for layer in range(len(self._experts)):
            for slot in range(len(SLOTS)):
                if slot in tickets:
                    self._add_experts(hidden, layer - 1, tickets.pop(slot))
                hidden[slot] = self._attend(hidden[slot], layer, slot)
                tickets[slot] = self._experts[layer].submit(slot, norm(hidden[slot]))
                if not pingpong:
                    self._add_experts(hidden, layer, tickets.pop(slot))
        for ticket in tickets.values():
            self._add_experts(hidden, len(self._experts) - 1, ticket)
        return hidden

    def _attend(self, hidden_states: Tensor, layer: int, slot: int) -> Tensor:
        begin = time.perf_counter()
        output: Tensor = self._attention(hidden_states)
        if output.is_cuda:
            torch.cuda.current_stream(
                output.device
            ).synchronize()  # experts may read only what has been written
        self.intervals.append(Interval("attention", SLOTS[slot], layer, begin, time.perf_counter()))
        return output

    def _add_experts(self, hidden: list[Tensor], layer: int, ticket: Ticket) -> None:
        hidden[ticket.slot] = hidden[ticket.slot] + self._experts[layer].wait(ticket)
        self.intervals.append(Interval("experts", SLOTS[ticket.slot], layer, ticket.begin, ticket.end))
