"""A layer whose routed experts are split over the ranks of an exchange."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd.activation import COMMON, ExpertRule
from expertd.kernels import Activation, Backend, HiddenStates, Routing, as_floats, fused_experts
from expertd.layout import Layout
from expertd.service.moe.layer import MoELayer, tokens_per_expert
from expertd.service.moe.parallel.exchange import Combined, Dispatched, Exchange
from expertd.service.moe.parallel.placed import PlacedExperts, tables_of
from expertd.service.moe.parallel.shared_gate import gate_of
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights, check_weights, cut, without_data

_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ParallelLayer:
    """One rank's side of a layer; calls are collective.

    shape     of the whole layer
    weights   the router, this rank's physical experts, then all shared experts
    exchange  connects the ranks
    routing   the router's rule; see `MoELayer`
    rule      what the experts compute
    exact     rows come home unreduced, one for each slot, at top_k times the memory and traffic
    physical  the expert of each physical expert, rank after rank, as in `Placement`; None: one replica
              of each, in order

    Each rank routes its own tokens, sends each once to every rank that holds one of its experts, runs its
    experts on what arrives, and sends back one row for each of these tokens: the weighted sum over its
    experts. The token's rank adds these rows in the order of ranks, then the shared experts', which it runs
    itself, all in float32.

    How far this is from one rank's `MoELayer`, for the same routing and a batch-invariant backend:

    - Tokens go out as they are. Rows come back in bfloat16 if `out` is bfloat16, otherwise in float32.
    - In float32, only the order of float32 additions differs: at most (top_k + R) * 2**-23 of the sum of
      absolute values. In bfloat16, each rank's row is also rounded once, by at most 2**-8 of its absolute
      value, as the result itself is. The bits do not depend on which rank has a token, nor on other tokens.
    - With `exact`, the bits are the same, up to the rounding of a shared expert's gate, and with several
      weights on inputs up to the order of additions. Rows come back in
      bfloat16, to which an expert's output is rounded before it is weighted in any case, and are added in
      the order of slots.

    The reference backend is batch-invariant on CPUs with bf16 instructions;
    `docs/internals/parallel-layer.md` has the rest.
    Where an expert has several replicas, a token's position chooses one (`placed.begin_step`); this, like the
    placement, changes which terms are added first, so only the bits of `exact` do not depend on it.
    Raises ValueError if weights, shape and placement do not match, or if there are more ranks than experts.
    """

    masked_max_tokens = 0
    is_capturable = False
    needs_floats = True  # tokens are sent as floats
    rank_tokens: tuple[int, ...] = ()

    def __init__(
        self,
        shape: LayerShape,
        weights: ExpertWeights,
        backend: Backend,
        exchange: Exchange,
        *,
        routing: Routing | None = None,
        rule: ExpertRule = COMMON,
        exact: bool = False,
        physical: Sequence[int] | None = None,
    ) -> None:
        tables = tables_of(shape, exchange.num_ranks, physical, weights.router.device)
        num_slots = len(tables.slots_of_rank[exchange.rank])
        own = replace(shape, local_experts=range(num_slots))
        check_weights(own, weights)
        self.shape = shape
        self.weights = weights
        self.backend = backend
        self.exact = exact
        self._exchange = exchange
        routed, self._shared = cut(weights, num_slots)
        self.placed = PlacedExperts(tables, exchange.rank, routed, self._shared, backend)
        # The shared experts see other tokens than the routed ones. This one's experts are slots, from 0 on.
        alone = replace(own, num_shared_experts=0)
        self._own = MoELayer(
            alone, replace(routed, shared_gate=None), backend, routing=routing, rule=ExpertRule(rule.routed)
        )
        self._rule = rule

    def pack(self, name: str) -> None:
        """See `MoELayer.pack`; for a layer on a CPU whose experts never move."""
        self._own.pack(name)
        self._shared = self._shared.with_matrix(name, self.backend.packed(self._shared.matrix(name)))
        self.weights = self.weights.with_matrix(name, without_data(self.weights.matrix(name)))
        self.placed.forget(name)

    def set_equal_token_counts(self, num_tokens: int) -> None:
        """Nothing: the ranks tell each other how many tokens they send."""

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

        T may differ between ranks, and be 0; dtypes may not. Ids outside 0 to E - 1 name no expert. `offsets`
        counts the rows that this rank's experts computed, for all ranks' tokens, and 0 for other experts; the
        shared experts' rows are those of this rank's tokens.

        Raises ValueError (name, expected, got), and then ExchangeError on the other ranks; ExchangeError if
        the exchange fails. If the backend fails, the other ranks wait until the exchange's timeout.
        """
        hidden_states = as_floats(hidden_states)
        try:
            topk_ids, topk_weights = self._own.routing_of(hidden_states, topk_ids, topk_weights)
            out = self._checked_out(hidden_states, out, offsets, num_sms)
            physical = self.placed.choose(topk_ids)
        except Exception:
            self._exchange.refuse()
            raise
        row_dtype = torch.bfloat16 if self.exact or out.dtype == torch.bfloat16 else torch.float32
        owners = self.placed.tables.owners(physical)
        arrived = self._exchange.dispatch(hidden_states, physical, topk_weights, owners, row_dtype)
        counts = hidden_states.new_zeros(len(self.placed.slots) + 1, dtype=torch.int32)
        # The weights are written before: the launch that adds up reads them before the preceding one ends.
        if self.exact:
            weights = torch.ones_like(topk_weights) if self._rule.weighs_input else topk_weights.contiguous()
            back = arrived.combine_slots(self._rows_of_slots(arrived, num_sms, counts))
        else:
            weights = topk_weights.new_ones((hidden_states.shape[0], self._exchange.num_ranks))
            back = arrived.combine(self._rows_of_tokens(arrived, row_dtype, num_sms, counts))
        if offsets is not None:
            offsets.copy_(self._offsets(counts, hidden_states.shape[0]), non_blocking=True)
        return self._add_up(back, weights, hidden_states, num_sms, out)

    def tokens_per_expert(self, offsets: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tokens of each expert, from the `offsets` of a call; 0 for other ranks' experts."""
        return tokens_per_expert(self.shape, offsets)

    def _rows_of_tokens(
        self, arrived: Dispatched, dtype: torch.dtype, num_sms: int | None, counts: Tensor
    ) -> Tensor:
        """[N, H]: the weighted sum of each arrived token's experts on this rank."""
        if self._rule.weighs_input:
            slots = self._rows_of_slots(arrived, num_sms, counts)
            size = arrived.hidden_states.shape
            total = torch.zeros(size, dtype=torch.float32, device=counts.device)
            return total.index_add_(0, self._here(arrived).nonzero()[:, 0], slots.float()).to(dtype)
        rows = torch.empty(arrived.hidden_states.shape, dtype=dtype, device=counts.device)
        routing = arrived.topk_ids - self.placed.slots.start, arrived.topk_weights
        return self._own(arrived.hidden_states, *routing, num_sms, rows, counts)

    def _rows_of_slots(self, arrived: Dispatched, num_sms: int | None, counts: Tensor) -> Tensor:
        """bf16 [P, H]: the output of each expert on this rank for each arrived token that chose it."""
        here = self._here(arrived)
        groups = arrived.topk_ids[here] - self.placed.slots.start
        rows = arrived.hidden_states[here.nonzero()[:, 0]]
        if self._rule.weighs_input:
            rows = rows.float() * arrived.topk_weights[here][:, None]
        return self._unweighted(rows, groups, self._own.weights, self._rule.routed, num_sms, counts)

    def _here(self, arrived: Dispatched) -> Tensor:
        """bool [N, top_k]: the slots whose expert is on this rank."""
        slots = self.placed.slots
        return (arrived.topk_ids >= slots.start) & (arrived.topk_ids < slots.stop)

    def _unweighted(
        self,
        hidden_states: Tensor,
        groups: Tensor,
        weights: ExpertWeights,
        activation: Activation,
        num_sms: int | None,
        offsets: Tensor | None = None,
    ) -> Tensor:
        """bf16 [P, H]: the output of one expert for each row."""
        ones = torch.ones((len(groups), 1), dtype=torch.float32, device=groups.device)
        return fused_experts(
            hidden_states, groups[:, None], ones,
            weights.gate_up, weights.down, out=torch.empty_like(hidden_states, dtype=torch.bfloat16),
            activation=activation, biases=weights.biases, backend=self.backend, num_sms=num_sms,
            offsets=offsets,
        )  # fmt: skip

    def _add_up(
        self, back: Combined, weights: Tensor, hidden_states: Tensor, num_sms: int | None, out: Tensor
    ) -> Tensor:
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        self.backend.unpermute(back.rows, back.index, weights, total)
        num_tokens, num_shared = hidden_states.shape[0], self.shape.num_shared_experts
        if num_shared > 0:
            groups = torch.arange(num_shared, dtype=torch.int32, device=out.device)
            groups = groups.repeat_interleave(num_tokens)
            repeated, activation = hidden_states.repeat(num_shared, 1), self._rule.shared
            rows = self._unweighted(repeated, groups, self._shared, activation, num_sms)
            gate = gate_of(self.weights, hidden_states)
            for shared in rows.view(num_shared, num_tokens, -1) if num_tokens else ():
                total += shared if gate is None else shared * gate
        return total if total is out else out.copy_(total)

    def _offsets(self, counts: Tensor, num_tokens: int) -> Tensor:
        """The call's offsets int32 [G + 1], over all experts of the layer, from those of this rank's."""
        held = self.shape.held_experts
        tokens = counts.new_zeros(len(held) + 1)
        tokens.index_add_(0, self.placed.experts - held.start + 1, counts.diff())
        shared = torch.arange(1, self.shape.num_shared_experts + 1, dtype=torch.int32, device=counts.device)
        return torch.cat([tokens.cumsum(0, dtype=torch.int32), counts[-1] + num_tokens * shared])

    def _checked_out(
        self, hidden_states: Tensor, out: Tensor | None, offsets: Tensor | None, num_sms: int | None
    ) -> Tensor:
        """out, or a new one. Raises ValueError before other ranks wait for this one."""
        size, groups = tuple(hidden_states.shape), (self.shape.num_groups + 1,)
        if num_sms is not None and num_sms < 1:
            raise ValueError(f"num_sms: expected None or at least 1, got {num_sms}")
        if offsets is not None and (offsets.shape != groups or offsets.dtype != torch.int32):
            raise ValueError(f"offsets: expected int32 {groups}, got {offsets.dtype} {tuple(offsets.shape)}")
        if out is None:
            return torch.empty(size, dtype=torch.float32, device=hidden_states.device)
        if out.shape != size or not out.is_contiguous():
            raise ValueError(f"out: expected a contiguous {size}, got {tuple(out.shape)}, {out.stride()}")
        if out.dtype not in _OUT_DTYPES:
            raise ValueError(f"out dtype: expected {' or '.join(map(str, _OUT_DTYPES))}, got {out.dtype}")
        return out
