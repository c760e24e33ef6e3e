"""A layer whose ranks are GPUs of one host, which exchange tokens and sums inside the layer's launches."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd.activation import COMMON, ExpertRule
from expertd.kernels import (
    Backend,
    ExpertBiases,
    HiddenStates,
    Overlap,
    OverlapMode,
    RankMemory,
    RankTokens,
    Routing,
    fused_experts,
    overlaps,
    values_of,
)
from expertd.layout import Layout
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.parallel.placed import PlacedExperts, tables_of
from expertd.service.moe.parallel.shared_gate import gate_of
from expertd.service.moe.parallel.torch_exchange import all_rows
from expertd.service.moe.separate import rows_per_token, weighed_rows
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights, cut


class SymmetricLayer:
    """One rank's side of a layer; calls are collective, and none waits on the host.

    shape     of the whole layer
    weights   the router, this rank's physical experts, then all shared experts
    backend   one that has `parallel_experts`
    memory    what the ranks share; layers on one stream may share it, too. With weights on inputs it is for a
              row for each slot of each token, with a top_k of 1
    routing   the router's rule; see `MoELayer`
    rule      what the experts compute
    physical  the expert of each physical expert, as in `ParallelLayer`
    overlap   lanes for calls that overlap, as `overlaps` decides by `overlap_mode`; None: none does. They are
              for layers on the whole GPU, not in a partition of it

    Each rank routes its own tokens, and runs the shared experts on them. The rest is
    `Backend.parallel_experts`: each rank's sum of a token's experts is rounded to bfloat16, and these sums
    are added up in float32 in the order of ranks. The bits do not depend on which rank has a token, nor on
    other tokens; with `memory.exact` they are those of one GPU, wherever the experts are.

    Biases of the second product are added in fp32, by the token's rank, which has those of all experts. With
    weights on inputs, each row that returns is one expert's: what the routed experts add has one GPU's bits.

    Making one is collective if the experts have biases. Raises ValueError if weights, memory and shape do not
    match, or if there are more ranks than experts.
    """

    masked_max_tokens = 0

    def __init__(
        self,
        shape: LayerShape,
        weights: ExpertWeights,
        backend: Backend,
        memory: RankMemory,
        *,
        routing: Routing | None = None,
        rule: ExpertRule = COMMON,
        physical: Sequence[int] | None = None,
        overlap: Overlap | None = None,
        overlap_mode: OverlapMode = "auto",
    ) -> None:
        self._each = rows_per_token(shape.top_k, rule)
        expected, got = (shape.hidden_size, shape.top_k // self._each), (memory.hidden_size, memory.top_k)
        if got != expected:
            raise ValueError(f"memory: expected hidden_size and top_k {expected}, got {got}")
        tables = tables_of(shape, memory.num_ranks, physical, weights.router.device)
        num_held = len(tables.slots_of_rank[memory.rank])
        own = replace(shape, local_experts=range(num_held))
        self.shape, self.weights, self.backend = shape, weights, backend
        self.is_capturable = backend.capabilities.captures
        self.memory = memory
        self._own = MoELayer(own, weights, backend, routing=routing)
        self._rule = rule
        self.needs_floats = weights.shared_gate is not None or rule.weighs_input
        self._routed, self._shared_weights = cut(weights, num_held)
        self.placed = PlacedExperts(tables, memory.rank, self._routed, self._shared_weights, backend)
        self._biases = None
        if self._routed.biases is not None:
            gate_up, down = self._routed.biases
            counts = [len(slots) for slots in tables.slots_of_rank]
            self._biases = ExpertBiases(gate_up.contiguous(), all_rows(down, counts, memory.group))
        every = range(shape.num_experts)
        self._is_placed = physical is not None or shape.held_experts != every  # else ids are physical ones
        self._overlap, self._overlap_mode = overlap, overlap_mode
        self.set_equal_token_counts(1)

    def set_token_counts(self, counts: Sequence[int]) -> None:
        """The next calls have counts[r] tokens on rank r. All ranks say the same before a call.

        Raises ValueError (name, expected, got) if the memory has no room for them.
        """
        rows = tuple(count * self._each for count in counts)
        self.memory.check(rows)
        self._tokens = RankTokens(rows, self.placed.tables.places)
        self.rank_tokens = tuple(counts)

    def set_equal_token_counts(self, num_tokens: int) -> None:
        """The next calls have `num_tokens` on each rank."""
        self.set_token_counts([num_tokens] * self.memory.num_ranks)

    def layout(self, num_tokens: int) -> Layout:
        """Always the contiguous one."""
        return Layout.CONTIGUOUS

    def route(self, hidden_states: Tensor, end_token: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `MoELayer.route`; not collective."""
        return self._own.route(hidden_states, end_token)

    def __call__(
        self,
        hidden_states: HiddenStates,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_sms: int | None = None,
        out: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """The layer's output for this rank's tokens [T, H]; see `MoELayer`, whose arguments these are.

        `offsets` counts the rows that this rank's experts computed, for all ranks' tokens.

        Raises ValueError (name, expected, got); the other ranks then wait until the memory's timeout.
        """
        (num_tokens, h), expected = values_of(hidden_states).shape, self.rank_tokens[self.memory.rank]
        if num_tokens != expected:
            raise ValueError(f"hidden_states: expected {expected} tokens on this rank, got {num_tokens}")
        topk_ids, topk_weights = self._own.routing_of(hidden_states, topk_ids, topk_weights)
        if out is None:
            out = torch.empty((num_tokens, h), dtype=torch.float32, device=topk_ids.device)
        if self._is_placed:
            topk_ids = self.placed.choose(topk_ids)
        in_place = self._each == 1 and self.shape.num_shared_experts == 0
        total = self._routed_rows(
            hidden_states, topk_ids, topk_weights, out if in_place else None, num_sms, offsets
        )
        if in_place:
            return out
        if self._each > 1:
            total = total.view(num_tokens, self._each, self.shape.hidden_size).sum(1)
        gate = gate_of(self.weights, hidden_states)
        for expert in range(self.shape.num_shared_experts if num_tokens > 0 else 0):
            rows = self._shared(hidden_states, expert, num_sms)
            total += rows if gate is None else rows * gate
        return out.copy_(total)

    def tokens_per_expert(self, offsets: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tokens of each expert, from the `offsets` of a call; 0 for other ranks' experts."""
        held = self.placed.held
        counts = np.zeros(self.shape.num_experts, offsets.dtype)
        np.add.at(counts, held, offsets[1 : len(held) + 1] - offsets[: len(held)])
        return counts

    def _routed_rows(
        self,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor | None,
        num_sms: int | None,
        offsets: Tensor | None,
    ) -> Tensor:
        """[T * rows_per_token, H]: what the ranks' experts compute together; `out`, or fp32 if it is None."""
        if self._rule.weighs_input:
            hidden_states, topk_ids, topk_weights = weighed_rows(hidden_states, topk_ids, topk_weights)
        if out is None:
            size = values_of(hidden_states).shape
            out = torch.empty(size, dtype=torch.float32, device=topk_ids.device)
        overlap = self._overlap
        if not overlaps(self._overlap_mode, self.rank_tokens, self.shape.hidden_size):
            overlap = None
        num_held = len(self.placed.slots)
        self.backend.parallel_experts(
            self.memory, self._tokens, hidden_states, topk_ids.contiguous(),
            topk_weights.contiguous(), self._routed.gate_up, self._routed.down, out,
            None if overlap else num_sms, None if offsets is None else offsets[: num_held + 1], overlap,
            self._rule.routed, self._biases,
        )  # fmt: skip
        return out

    def _shared(self, hidden_states: HiddenStates, expert: int, num_sms: int | None) -> Tensor:
        """fp32 [T, H]: the output of one shared expert."""
        rows = values_of(hidden_states)
        size, device = (rows.shape[0], 1), rows.device
        ids = torch.full(size, expert, dtype=torch.int32, device=device)
        weights = self._shared_weights.gate_up, self._shared_weights.down
        ones = torch.ones(size, dtype=torch.float32, device=device)
        return fused_experts(
            hidden_states, ids, ones, *weights,
            activation=self._rule.shared, biases=self._shared_weights.biases, backend=self.backend,
            num_sms=num_sms,
        )  # fmt: skip
