"""The MoE layer: its router, and its experts in one of two layouts."""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from expertd.activation import COMMON, ExpertRule
from expertd.kernels import (
    Backend,
    HiddenStates,
    Quantized,
    Routing,
    Stages,
    as_floats,
    fused_experts,
    values_of,
)
from expertd.kernels.device_calls import CallTable
from expertd.layout import Layout
from expertd.service.moe.expert_store import ExpertStore
from expertd.service.moe.masked import masked_experts
from expertd.service.moe.needs import part_of_layer
from expertd.service.moe.separate import SeparateExperts, has_two_rules, needs_two_calls
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights, check_weights

_HIDDEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class MoELayer:
    """One layer of experts. Calls do not synchronize with the device and keep no state.

    routing            the router's rule; None: softmax, with weights that sum to 1. weights.router_bias is
                       added to the scores for the choice of experts
    rule               what the experts compute
    masked_max_tokens  steps of up to this many tokens use the masked layout (see `masked_experts`), larger
                       ones the contiguous layout; must be 0 for a layer that holds only some of its experts,
                       and for another rule than the common one, with biases, and if the hidden size is not a
                       multiple of 128
    store              has the experts, and `weights` those that are on the device, see `ExpertStore`; None:
                       `weights` has all. With a store, calls wait for the routing, and keep state

    The layer is batch-invariant up to rounding: a token's result does not depend on the rest of the batch.
    Activations are rounded to FP8, or to bf16 on a CPU in the contiguous layout. NaN in a token stays in its
    own row. Raises ValueError if weights and shape do not match.
    """

    tokens_per_expert: Callable[[NDArray[np.int32]], NDArray[np.int32]]
    """Tokens of each expert, from the `offsets` of a call; 0 for experts held elsewhere. Holds no weights."""
    needs_floats: bool
    rank_tokens: tuple[int, ...] = ()

    def __init__(
        self,
        shape: LayerShape,
        weights: ExpertWeights,
        backend: Backend,
        *,
        routing: Routing | None = None,
        rule: ExpertRule = COMMON,
        masked_max_tokens: int = 0,
        store: ExpertStore | None = None,
    ) -> None:
        check_weights(shape if store is None else part_of_layer(shape, store.num_slots), weights)
        self.routing = routing or Routing()
        self.routing.check(shape.num_experts, shape.top_k)
        self._rule = rule
        two_calls = needs_two_calls(shape, rule)
        if two_calls and weights.biases is not None:
            raise ValueError("biases: expected none with this rule of the experts, got some")
        if store is not None:
            two_calls = False
            if has_two_rules(shape, rule):
                raise ValueError("store: expected none with this rule of the experts, got one")
        self._separate = SeparateExperts(shape, weights, backend, rule) if two_calls else None
        plain = rule == COMMON and weights.biases is None and not shape.splits_shared
        _check_masked(shape, masked_max_tokens, plain)
        self.shape = shape
        self.tokens_per_expert = partial(tokens_per_expert, shape)
        self.weights = weights
        self.backend = backend
        self.store = store
        self.is_capturable = backend.capabilities.captures and store is None
        self.masked_max_tokens = masked_max_tokens
        device = weights.router.device
        self._shared_ids = torch.arange(
            len(shape.held_experts), shape.num_groups, dtype=torch.int32, device=device
        )
        self._shared_weights = torch.ones(shape.num_shared_experts, dtype=torch.float32, device=device)
        gate = weights.shared_gate
        self._shared_gate = None if gate is None or not shape.num_shared_experts else gate.float()
        self._bias = None if weights.router_bias is None else weights.router_bias.contiguous()
        self.needs_floats = self._shared_gate is not None or rule.weighs_input
        self._router = weights.router.to(torch.float32).contiguous()
        self._bf16_router = None
        if backend.capabilities.routes_bf16:
            in_bf16 = weights.router.to(torch.bfloat16).contiguous()
            if in_bf16.to(torch.float32).equal(self._router):
                self._bf16_router = in_bf16

    def pack(self, name: str) -> None:
        """Keep of one of the experts' MATRICES what calls need: of a backend that packs, its copy alone.

        Afterwards `weights` has no data of it. One after the other, so that the data of the first is freed.
        """
        if self.store is not None:
            return  # copies change the experts
        if self._separate is None:
            packed = self.backend.packed(self.weights.matrix(name), pairs=name == "gate_up")
            self.weights = self.weights.with_matrix(name, packed)
        elif self._separate.pack(name):
            self.weights = self.weights.without_matrix(name)

    def set_equal_token_counts(self, num_tokens: int) -> None:
        """For layers with ranks: the next calls have `num_tokens` on each. Here nothing depends on it."""

    def layout(self, num_tokens: int) -> Layout:
        """The layout of a call with `num_tokens` tokens."""
        return Layout.MASKED if num_tokens <= self.masked_max_tokens else Layout.CONTIGUOUS

    def route(self, hidden_states: Tensor, end_token: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(topk_ids int32 [T, top_k], topk_weights fp32 [T, top_k]) of hidden_states [T, H]; fp32 logits.

        Tokens from end_token on, an int32 scalar that the device can read, are padding and get expert -1.

        Batch-invariant on a GPU for bfloat16 hidden states, a router whose values bfloat16 can represent,
        and at most 32 for both top_k and num_expert_groups. Otherwise a library computes the logits, and its
        order of summation may depend on T.
        """
        self._check_hidden_states(hidden_states)
        if hidden_states.shape[0] == 0:
            size = (0, self.shape.top_k)
            nothing = torch.empty(size, dtype=torch.float32, device=hidden_states.device)
            return nothing.to(torch.int32), nothing
        if not self.routing.in_kernels:
            return self.backend.route_in_steps(
                hidden_states, self._router, self._bias, self.shape.top_k, self.routing, end_token
            )
        # bf16 products are exact in float32, and take a fraction of the time.
        router = self._router
        if self._bf16_router is not None and hidden_states.dtype == torch.bfloat16:
            router = self._bf16_router
        return self.backend.route(
            hidden_states, router, self._bias, self.shape.top_k, self.routing, end_token
        )

    def routing_of(
        self, hidden_states: HiddenStates, topk_ids: Tensor | None, topk_weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What a call with these arguments uses: the given routing, or that of `route`. Checks them."""
        self._check_hidden_states(hidden_states)
        if topk_ids is None and topk_weights is None:
            topk_ids, topk_weights = self.route(as_floats(hidden_states))
        if topk_ids is None or topk_weights is None:
            raise ValueError("topk_ids and topk_weights: expected both or neither, got one")
        self._check_routing(values_of(hidden_states).shape[0], topk_ids, topk_weights)
        return topk_ids, topk_weights

    def __call__(
        self,
        hidden_states: HiddenStates,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_sms: int | None = None,
        out: Tensor | None = None,
        offsets: Tensor | None = None,
        stages: Stages | None = None,
    ) -> Tensor:
        """The layer's output [T, H], summed in float32.

        hidden_states  bfloat16, float16 or float32 [T, H]; or Quantized, which the experts multiply as it is,
                       and whose values (`as_floats`) are what the router, a gate and weights of inputs read
        topk_ids       int32 [T, top_k], each from 0 to E - 1, or -1: no expert, whatever its weight is; no
                       expert twice in a row. Not checked, since that would read the device;
                       `LayerRunner.validate` does
        topk_weights   fp32 [T, top_k]. Pass both or neither; with neither, `route` chooses
        num_sms        SMs for the GEMMs; None: all
        out            float32, bfloat16 or float16 [T, H] to write to; None: a new float32 tensor
        offsets        int32 [G + 1] to write to, on the device or pinned: see `fused_experts`
        stages         notified of "router" unless the routing is given, and of the stages of `fused_experts`,
                       in the masked layout and with a store of "experts"

        Raises ValueError (name, expected, got).
        """
        routes = topk_ids is None
        topk_ids, topk_weights = self.routing_of(hidden_states, topk_ids, topk_weights)
        if stages is not None and routes:
            stages.mark("router")
        if self._separate is not None:
            routed, shared = self._held(topk_ids, topk_weights), self._shared(hidden_states)
            return self._separate(hidden_states, routed, shared, num_sms, out, offsets, stages)
        group_ids, weights = self._groups(hidden_states, topk_ids, topk_weights)
        if self.store is not None:
            result = self.store(hidden_states, group_ids, weights, self._rule.routed, num_sms, out, offsets)
            if stages is not None:
                stages.mark("experts")
            return result
        gate_up, down = self.weights.gate_up, self.weights.down
        num_tokens = len(topk_ids)
        if num_tokens > 0 and self.layout(num_tokens) is Layout.MASKED:
            result = masked_experts(
                hidden_states, group_ids, weights, gate_up, down, self.backend, num_sms, offsets
            )
            if stages is not None:
                stages.mark("experts")
            return result if out is None else out.copy_(result)
        return fused_experts(
            hidden_states, group_ids, weights, gate_up, down,
            out=out, activation=self._rule.routed, biases=self.weights.biases, backend=self.backend,
            num_sms=num_sms, offsets=offsets, stages=stages,
        )  # fmt: skip

    def in_slots(
        self,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_sms: int | None,
        out: Tensor,
        offsets: Tensor,
    ) -> Tensor:
        """A call for graphs of a layer with a store, see `ExpertStore.in_slots`."""
        assert self.store is not None
        group_ids, weights = self._groups(hidden_states, topk_ids, topk_weights)
        return self.store.in_slots(
            hidden_states, group_ids, weights, self._rule.routed, num_sms, out, offsets
        )

    def call_experts(self, calls: CallTable, num_tokens: int, num_sms: int | None) -> bool:
        """Enqueue a whole step of device calls of at most `num_tokens`: see `Backend.call_experts`.

        False: nothing was, because the layer has more than experts that are all here, or one SM.
        """
        shape, weights = self.shape, self.weights
        if self._separate is not None or shape.is_part or shape.num_shared_experts or num_sms == 1:
            return False
        self.backend.call_experts(
            calls, num_tokens, shape.top_k, weights.gate_up, weights.down, self._rule.routed, num_sms,
            weights.biases,
        )  # fmt: skip
        return True

    def _groups(
        self, hidden_states: HiddenStates, topk_ids: Tensor, topk_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Group (-1: none here) and weight of each (token, slot), shared experts after the routed ones."""
        topk_ids, topk_weights = self._held(topk_ids, topk_weights)
        if self.shape.num_shared_experts == 0:
            return topk_ids, topk_weights
        ids, weights = self._shared(hidden_states)
        return torch.cat([topk_ids, ids], dim=1), torch.cat([topk_weights, weights], dim=1)

    def _held(self, topk_ids: Tensor, topk_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Group (-1: none here) and weight of each (token, slot) of the routed experts."""
        if self.shape.is_part:
            held = self.shape.held_experts
            inside = (topk_ids >= held.start) & (topk_ids < held.stop)
            topk_ids = torch.where(inside, topk_ids - held.start, -1)
        return topk_ids.contiguous(), topk_weights.contiguous()

    def _shared(self, hidden_states: HiddenStates) -> tuple[Tensor, Tensor]:
        """Group and weight of each (token, shared expert), both [T, S]."""
        num_tokens = values_of(hidden_states).shape[0]
        ids = self._shared_ids.expand(num_tokens, -1)
        if self._shared_gate is None:
            return ids, self._shared_weights.expand(num_tokens, -1)
        gates = (as_floats(hidden_states).to(torch.float32) @ self._shared_gate).sigmoid()
        return ids, gates[:, None].expand(-1, self.shape.num_shared_experts)

    def _check_hidden_states(self, hidden_states: HiddenStates) -> None:
        rows = values_of(hidden_states)
        if rows.ndim != 2 or rows.shape[1] != self.shape.hidden_size:
            expected = f"[T, {self.shape.hidden_size}]"
            raise ValueError(f"hidden_states shape: expected {expected}, got {tuple(rows.shape)}")
        dtypes = (torch.float8_e4m3fn,) if isinstance(hidden_states, Quantized) else _HIDDEN_DTYPES
        if rows.dtype not in dtypes:
            expected = " or ".join(map(str, dtypes))
            raise ValueError(f"hidden_states dtype: expected {expected}, got {rows.dtype}")

    def _check_routing(self, num_tokens: int, topk_ids: Tensor, topk_weights: Tensor) -> None:
        expected = (num_tokens, self.shape.top_k)
        for name, tensor, dtype in (
            ("topk_ids", topk_ids, torch.int32),
            ("topk_weights", topk_weights, torch.float32),
        ):
            if tensor.shape != expected:
                raise ValueError(f"{name} shape: expected {expected}, got {tuple(tensor.shape)}")
            if tensor.dtype != dtype:
                raise ValueError(f"{name} dtype: expected {dtype}, got {tensor.dtype}")


def _check_masked(shape: LayerShape, masked_max_tokens: int, plain: bool) -> None:
    """Raise ValueError unless the layer can have steps in the masked layout of so many tokens."""
    part, plain = shape.is_part, plain and shape.has_whole_blocks
    if masked_max_tokens < 0 or (masked_max_tokens > 0 and (part or not plain)):
        expected = (
            "0 with local_experts" if part else "at least 0" if plain else "0 with this rule of the experts"
        )
        raise ValueError(f"masked_max_tokens: expected {expected}, got {masked_max_tokens}")


def tokens_per_expert(shape: LayerShape, offsets: NDArray[np.int32]) -> NDArray[np.int32]:
    """Tokens of each expert [E], from the offsets [G + 1] of a call; 0 for experts held elsewhere."""
    held = shape.held_experts
    tokens = offsets[1 : len(held) + 1] - offsets[: len(held)]
    if len(tokens) < shape.num_experts:
        tokens = np.pad(tokens, (held.start, shape.num_experts - held.stop))
    return tokens
