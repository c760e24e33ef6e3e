"""A layer whose routed experts are split over ranks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd.activation import COMMON, ExpertRule
from expertd.kernels import Backend, HiddenStates, Routing, as_floats, fused_experts, values_of
from expertd.kernels.device_calls import CallTable
from expertd.layout import Layout
from expertd.service.moe.expert_store import ExpertStore
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.parallel.exchange import Exchange
from expertd.service.moe.parallel.placed import PlacedExperts, tables_of
from expertd.service.moe.parallel.routed import (
    DispatchedExperts,
    JointExchange,
    JointExperts,
    RoutedExperts,
)
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights, check_weights, copied, cut

MakeStore = Callable[[LayerShape, ExpertWeights], ExpertStore]
_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ParallelLayer:
    """One rank's side of a layer; calls are collective.

    shape     of the whole layer
    weights   the router, this rank's physical experts, then all shared experts
    exchange  connects the ranks, between the layer's launches (`DispatchedExperts`) or inside them
              (`JointExperts`)
    routing   the router's rule; see `MoELayer`
    rule      what the experts compute
    exact     see `DispatchedExperts`; a `JointExchange` has it in its memory
    physical  the expert of each physical expert, rank after rank, as in `Placement`; None: one replica
              of each, in order
    store     makes a store of this rank's physical experts, of which `weights` then has those in the host's
              memory. None: there is none

    Each rank routes its own tokens, and runs the shared experts on them. The routed experts run where they
    are; what they add to a token comes back to its rank, which adds the shared experts', all in float32.

    How far this is from one rank's `MoELayer`, for the same routing and a batch-invariant backend:

    - Rows come back in bfloat16 if `out` is bfloat16, or between GPUs of one host; otherwise in float32.
    - In float32, only the order of float32 additions differs: at most (top_k + R) * 2**-23 of the sum of
      absolute values. In bfloat16, each rank's row is also rounded once, by at most 2**-8 of its absolute
      value, as the result itself is. The bits do not depend on which rank has a token, nor on other tokens.
    - With `exact`, the bits are the same, up to the rounding of a shared expert's gate, and with several
      weights on inputs up to the order of additions. Rows come back in bfloat16, to which an expert's output
      is rounded before it is weighted in any case, and are added in the order of slots.

    The backend `cpu` is batch-invariant, and `reference` is on CPUs with bf16 instructions;
    `docs/internals/parallel-layer.md` has the rest.
    Where an expert has several replicas, a token's position chooses one (`placed.begin_step`); this, like the
    placement, changes which terms are added first, so only the bits of `exact` do not depend on it.
    Raises ValueError if weights, shape, placement and memory do not match, or if there are more ranks than
    experts. Making one is collective if the experts have biases, with a `JointExchange`.
    """

    masked_max_tokens = 0

    def __init__(
        self,
        shape: LayerShape,
        weights: ExpertWeights,
        backend: Backend,
        exchange: Exchange | JointExchange,
        *,
        routing: Routing | None = None,
        rule: ExpertRule = COMMON,
        exact: bool = False,
        physical: Sequence[int] | None = None,
        store: MakeStore | None = None,
    ) -> None:
        tables = tables_of(shape, exchange.num_ranks, physical, weights.router.device)
        num_slots = len(tables.slots_of_rank[exchange.rank])
        own = replace(shape, local_experts=range(num_slots))
        check_weights(own, weights)
        self.shape, self.weights, self.backend = shape, weights, backend
        self._rule, self._num_ranks = rule, exchange.num_ranks
        routed, self._shared = cut(weights, num_slots)
        # The shared experts see other tokens than the routed ones. This one's experts are slots, from 0 on.
        alone, made = replace(own, num_shared_experts=0), None
        down_bias = None if routed.biases is None else routed.biases.down
        if store is not None:
            made = store(alone, routed)
            self.weights = routed = made.on_device(routed)
            self._shared = copied(self._shared, weights.router.device)  # or else all experts would stay
        self.placed = PlacedExperts(tables, exchange.rank, routed, self._shared, backend, made)
        self._own = MoELayer(
            alone, replace(routed, shared_gate=None), backend,
            routing=routing, rule=ExpertRule(rule.routed), store=made,
        )  # fmt: skip
        self._routed: RoutedExperts
        if isinstance(exchange, JointExchange):
            chooses = physical is not None or shape.held_experts != range(shape.num_experts)
            joint = shape, self._own, rule, self.placed, exchange, chooses, down_bias
            self._routed = JointExperts(*joint)
        else:
            self._routed = DispatchedExperts(self._own, rule, self.placed, exchange, exact)
        self.is_capturable = self._routed.is_capturable
        self.needs_floats = self._routed.needs_floats or weights.shared_gate is not None

    @property
    def rank_tokens(self) -> tuple[int, ...]:
        """See `Layer.rank_tokens`."""
        return self._routed.rank_tokens

    def pack(self, name: str) -> None:
        """See `MoELayer.pack`; for a layer whose experts never move."""
        self._own.pack(name)
        shared = self.backend.packed(self._shared.matrix(name), pairs=name == "gate_up")
        self._shared = self._shared.with_matrix(name, shared)
        self.weights = self.weights.without_matrix(name)
        self.placed.forget(name)

    def set_token_counts(self, counts: Sequence[int]) -> None:
        """The next calls have counts[r] tokens on rank r. All ranks say the same before a call.

        Raises ValueError (name, expected, got) if the ranks have no room for them.
        """
        self._routed.set_token_counts(counts)

    def call_experts(self, calls: CallTable, num_tokens: int, num_sms: int | None) -> bool:
        """See `MoELayer`; ranks compute no device calls."""
        return False

    def set_equal_token_counts(self, num_tokens: int) -> None:
        """The next calls have `num_tokens` on each rank."""
        self.set_token_counts([num_tokens] * self._num_ranks)

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
        begins with those of this rank's physical experts, for all ranks' tokens; the rest is not written.

        Raises ValueError (name, expected, got). With an `Exchange`, the other ranks then raise ExchangeError,
        as all do if the exchange fails; with a `JointExchange`, they wait until the memory's timeout. If the
        backend fails, they wait until the timeout in any case.
        """
        if self.needs_floats:
            hidden_states = as_floats(hidden_states)
        try:
            self._routed.check(values_of(hidden_states).shape[0])
            topk_ids, topk_weights = self._own.routing_of(hidden_states, topk_ids, topk_weights)
            out = self._checked_out(values_of(hidden_states), out, offsets, num_sms)
        except Exception:
            self._routed.refuse()
            raise
        own_offsets = None if offsets is None else offsets[: len(self.placed.slots) + 1]
        total = self._routed(hidden_states, topk_ids, topk_weights, num_sms, out, own_offsets)
        if self.shape.num_shared_experts > 0 and len(out) > 0:
            gate = self._gate(hidden_states)
            for expert in range(self.shape.num_shared_experts):
                rows = self._shared_rows(hidden_states, expert, num_sms)
                total += rows if gate is None else rows * gate
        return total if total is out else out.copy_(total)

    def tokens_per_expert(self, offsets: NDArray[np.int32]) -> NDArray[np.int32]:
        """Tokens of each expert, from the `offsets` of a call; 0 for other ranks' experts."""
        held = self.placed.held
        counts = np.zeros(self.shape.num_experts, offsets.dtype)
        np.add.at(counts, held, offsets[1 : len(held) + 1] - offsets[: len(held)])
        return counts

    def _gate(self, hidden_states: HiddenStates) -> Tensor | None:
        """fp32 [T, 1]: what the shared experts' output is multiplied by; None: nothing."""
        gate = self.weights.shared_gate
        return None if gate is None else (as_floats(hidden_states).float() @ gate.float()).sigmoid()[:, None]

    def _shared_rows(self, hidden_states: HiddenStates, expert: int, num_sms: int | None) -> Tensor:
        """fp32 [T, H]: the output of one shared expert."""
        rows = values_of(hidden_states)
        size, device = (rows.shape[0], 1), rows.device
        ids = torch.full(size, expert, dtype=torch.int32, device=device)
        ones = torch.ones(size, dtype=torch.float32, device=device)
        return fused_experts(
            hidden_states, ids, ones, self._shared.gate_up, self._shared.down,
            activation=self._rule.shared, biases=self._shared.biases, backend=self.backend,
            num_sms=num_sms,
        )  # fmt: skip

    def _checked_out(
        self, rows: Tensor, out: Tensor | None, offsets: Tensor | None, num_sms: int | None
    ) -> Tensor:
        """out, or a new one. Raises ValueError before other ranks wait for this one."""
        size, groups = tuple(rows.shape), (self.shape.num_groups + 1,)
        if num_sms is not None and num_sms < 1:
            raise ValueError(f"num_sms: expected None or at least 1, got {num_sms}")
        if offsets is not None and (offsets.shape != groups or offsets.dtype != torch.int32):
            raise ValueError(f"offsets: expected int32 {groups}, got {offsets.dtype} {tuple(offsets.shape)}")
        if out is None:
            return torch.empty(size, dtype=torch.float32, device=rows.device)
        if out.shape != size or not out.is_contiguous():
            raise ValueError(f"out: expected a contiguous {size}, got {tuple(out.shape)}, {out.stride()}")
        if out.dtype not in _OUT_DTYPES:
            raise ValueError(f"out dtype: expected {' or '.join(map(str, _OUT_DTYPES))}, got {out.dtype}")
        return out
