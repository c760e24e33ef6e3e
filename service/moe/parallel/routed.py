"""How ranks compute a layer's routed experts together: by an exchange between launches, or inside them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from expertd.activation import ExpertRule
from expertd.kernels import (
    ExpertBiases,
    HiddenStates,
    Overlap,
    OverlapMode,
    PartsOfRank,
    RankMemory,
    RankTokens,
    fused_experts,
    overlaps,
    values_of,
)
from expertd.service.moe.layer import MoELayer
from expertd.service.moe.parallel.exchange import Dispatched, Exchange
from expertd.service.moe.parallel.placed import PlacedExperts
from expertd.service.moe.parallel.torch_exchange import all_rows
from expertd.service.moe.separate import rows_per_token, weighed_rows
from expertd.service.moe.shape import LayerShape


class RoutedExperts(Protocol):
    """Those of all ranks, for this rank's tokens; calls are collective.

    is_capturable, needs_floats, rank_tokens  see `base.Layer`
    """

    is_capturable: bool
    needs_floats: bool
    rank_tokens: tuple[int, ...]

    def set_token_counts(self, counts: Sequence[int]) -> None:
        """The next calls have counts[r] tokens on rank r. Raises ValueError (name, expected, got)."""

    def check(self, num_tokens: int) -> None:
        """Raise ValueError unless the next call may have so many tokens on this rank."""

    def refuse(self) -> None:
        """Take part in a call whose arguments this rank cannot use."""

    def __call__(
        self,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_sms: int | None,
        out: Tensor,
        offsets: Tensor | None,
    ) -> Tensor:
        """What the routed experts add to this rank's tokens [T, H]: `out`, or an fp32 tensor.

        offsets  int32 [G + 1] to write to, over this rank's experts, of all ranks' tokens
        """


_OwnTokens = tuple[RankMemory, RankTokens, HiddenStates, Tensor, Tensor]  # with their routing


@dataclass(frozen=True)
class JointExchange:
    """Ranks that are GPUs of one host, which exchange tokens and sums inside the layer's launches.

    memory        what the ranks share; layers on one stream may share it, too. With weights on inputs it is
                  for a row for each slot of each token, with a top_k of 1
    overlap       lanes for calls that overlap, as `overlaps` decides by `overlap_mode`; None: none does. They
                  are for layers on the whole GPU, not in a partition of it
    """

    memory: RankMemory
    overlap: Overlap | None = None
    overlap_mode: OverlapMode = "auto"

    @property
    def rank(self) -> int:
        return self.memory.rank

    @property
    def num_ranks(self) -> int:
        return self.memory.num_ranks


class JointExperts:
    """By `Backend.parallel_experts`; no call waits on the host, unless there is a store of the own experts.

    With one, a call waits until all ranks' routing is known, and then sends tokens, with the same bits.

    Each rank's sum of a token's experts is rounded to bfloat16, and these sums are added up in float32 in the
    order of ranks. With `memory.exact`, the bits are those of one GPU, wherever the experts are.

    Biases of the second product are added in fp32, by the token's rank, which has those of all experts. With
    weights on inputs, each row that returns is one expert's: what the routed experts add has one GPU's bits.

    own         this rank's physical experts alone
    chooses     whether ids of experts are not those of physical experts
    down_bias   bf16 [physical experts here, H], on any device; None: there is none

    Making one is collective if the experts have biases. Raises ValueError if memory and shape do not match.
    """

    def __init__(
        self,
        shape: LayerShape,
        own: MoELayer,
        rule: ExpertRule,
        placed: PlacedExperts,
        exchange: JointExchange,
        chooses: bool,
        down_bias: Tensor | None,
    ) -> None:
        self._exchange, self._memory = exchange, exchange.memory
        self._each = rows_per_token(shape.top_k, rule)
        expected = shape.hidden_size, shape.top_k // self._each
        got = self._memory.hidden_size, self._memory.top_k
        if got != expected:
            raise ValueError(f"memory: expected hidden_size and top_k {expected}, got {got}")
        self.is_capturable = own.backend.capabilities.captures and own.store is None
        self.needs_floats = rule.weighs_input
        self._own, self._backend = own, own.backend
        self._shape, self._rule, self._placed, self._chooses = shape, rule, placed, chooses
        self._down_bias = None
        if down_bias is not None:
            counts = [len(slots) for slots in placed.tables.slots_of_rank]
            of_rank = down_bias.to(own.weights.router.device)
            self._down_bias = all_rows(of_rank, counts, self._memory.group)
        self.set_token_counts([1] * self._memory.num_ranks)

    def set_token_counts(self, counts: Sequence[int]) -> None:
        """See `RoutedExperts.set_token_counts`; all ranks say the same, and the memory has to have room."""
        rows = tuple(count * self._each for count in counts)
        self._memory.check(rows)
        self._tokens = RankTokens(rows, self._placed.tables.places)
        self.rank_tokens = tuple(counts)

    def check(self, num_tokens: int) -> None:
        """See `RoutedExperts.check`."""
        expected = self.rank_tokens[self._memory.rank]
        if num_tokens != expected:
            raise ValueError(f"hidden_states: expected {expected} tokens on this rank, got {num_tokens}")

    def refuse(self) -> None:
        """Nothing: the other ranks wait until the memory's timeout."""

    def __call__(
        self,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_sms: int | None,
        out: Tensor,
        offsets: Tensor | None,
    ) -> Tensor:
        """See `RoutedExperts.__call__`."""
        if self._chooses:
            topk_ids = self._placed.choose(topk_ids)
        if self._rule.weighs_input:
            hidden_states, topk_ids, topk_weights = weighed_rows(hidden_states, topk_ids, topk_weights)
        if self._each > 1 or self._shape.num_shared_experts > 0:
            out = torch.empty(values_of(hidden_states).shape, dtype=torch.float32, device=topk_ids.device)
        routed = (
            self._memory, self._tokens, hidden_states, topk_ids.contiguous(), topk_weights.contiguous()
        )  # fmt: skip
        if self._own.store is not None:
            self._call_store(routed, out, num_sms, offsets)
        else:
            self._call(routed, out, num_sms, offsets)
        return out.view(-1, self._each, self._shape.hidden_size).sum(1) if self._each > 1 else out

    def _call(self, routed: _OwnTokens, out: Tensor, num_sms: int | None, offsets: Tensor | None) -> None:
        overlap = self._exchange.overlap
        if not overlaps(self._exchange.overlap_mode, self.rank_tokens, self._shape.hidden_size):
            overlap = None
        weights, biases = self._own.weights, None
        if weights.biases is not None and self._down_bias is not None:
            biases = ExpertBiases(weights.biases.gate_up, self._down_bias)
        self._backend.parallel_experts(
            *routed, weights.gate_up, weights.down, out, None if overlap else num_sms, offsets, overlap,
            self._rule.routed, biases,
        )  # fmt: skip

    def _call_store(
        self, routed: _OwnTokens, out: Tensor, num_sms: int | None, offsets: Tensor | None
    ) -> None:
        assert self._own.store is not None

        def call(written: Tensor, parts_of: Callable[[], PartsOfRank]) -> None:
            self._backend.parallel_experts_in_parts(
                *routed, len(self._placed.slots), parts_of, out, num_sms, written, self._rule.routed,
                self._down_bias,
            )  # fmt: skip

        self._own.store.on_rank(call, offsets)


class DispatchedExperts:
    """Each rank sends a token once to every rank that holds one of its experts, runs its experts on what
    arrives, and sends rows back, which the token's rank adds in float32.

    exact  rows come home unreduced, one for each slot, at top_k times the memory and traffic, and are added
           in the order of slots. Else one row for each token and rank, the weighted sum of the rank's
           experts, in the order of ranks

    See `JointExperts` for own.
    """

    is_capturable = False
    needs_floats = True  # tokens are sent as floats
    rank_tokens: tuple[int, ...] = ()

    def __init__(
        self, own: MoELayer, rule: ExpertRule, placed: PlacedExperts, exchange: Exchange, exact: bool
    ) -> None:
        self._own, self._rule, self._placed = own, rule, placed
        self._exchange, self._exact = exchange, exact

    def set_token_counts(self, counts: Sequence[int]) -> None:
        """Nothing: the ranks tell each other how many tokens they send."""

    def check(self, num_tokens: int) -> None:
        """Nothing: T may differ between ranks, and be 0."""

    def refuse(self) -> None:
        """See `RoutedExperts.refuse`."""
        self._exchange.refuse()

    def __call__(
        self,
        hidden_states: HiddenStates,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_sms: int | None,
        out: Tensor,
        offsets: Tensor | None,
    ) -> Tensor:
        """See `RoutedExperts.__call__`."""
        assert isinstance(hidden_states, Tensor)
        physical = self._placed.choose(topk_ids)
        row_dtype = torch.bfloat16 if self._exact or out.dtype == torch.bfloat16 else torch.float32
        owners = self._placed.tables.owners(physical)
        arrived = self._exchange.dispatch(hidden_states, physical, topk_weights, owners, row_dtype)
        counts = hidden_states.new_zeros(len(self._placed.slots) + 1, dtype=torch.int32)
        # The weights are written before: the launch that adds up reads them before the preceding one ends.
        if self._exact:
            weights = torch.ones_like(topk_weights) if self._rule.weighs_input else topk_weights.contiguous()
            back = arrived.combine_slots(self._rows_of_slots(arrived, num_sms, counts))
        else:
            weights = topk_weights.new_ones((hidden_states.shape[0], self._exchange.num_ranks))
            back = arrived.combine(self._rows_of_tokens(arrived, row_dtype, num_sms, counts))
        if offsets is not None:
            offsets.copy_(counts, non_blocking=True)
        total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
        self._own.backend.unpermute(back.rows, back.index, weights, total)
        return total

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
        routing = arrived.topk_ids - self._placed.slots.start, arrived.topk_weights
        return self._own(arrived.hidden_states, *routing, num_sms, rows, counts)

    def _rows_of_slots(self, arrived: Dispatched, num_sms: int | None, counts: Tensor) -> Tensor:
        """bf16 [P, H]: the output of each expert on this rank for each arrived token that chose it."""
        here = self._here(arrived)
        groups = arrived.topk_ids[here] - self._placed.slots.start
        rows = arrived.hidden_states[here.nonzero()[:, 0]]
        if self._rule.weighs_input:
            rows = rows.float() * arrived.topk_weights[here][:, None]
        ones = torch.ones((len(groups), 1), dtype=torch.float32, device=groups.device)
        weights, out = self._own.weights, torch.empty_like(rows, dtype=torch.bfloat16)
        if self._own.store is not None:
            return self._own.store(rows, groups[:, None], ones, self._rule.routed, num_sms, out, counts)
        return fused_experts(
            rows, groups[:, None], ones,
            weights.gate_up, weights.down, out=out,
            activation=self._rule.routed, biases=weights.biases, backend=self._own.backend,
            num_sms=num_sms, offsets=counts,
        )  # fmt: skip

    def _here(self, arrived: Dispatched) -> Tensor:
        """bool [N, top_k]: the slots whose expert is on this rank."""
        slots = self._placed.slots
        return (arrived.topk_ids >= slots.start) & (arrived.topk_ids < slots.stop)
