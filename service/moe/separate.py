"""Experts whose rule needs two calls: one for the routed experts, one for the shared ones."""

import torch
from torch import Tensor

from expertd.activation import ExpertRule
from expertd.kernels import Backend, fused_experts
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights, cut


def needs_two_calls(shape: LayerShape, rule: ExpertRule) -> bool:
    """Whether one call cannot compute a layer's routed and shared experts together."""
    return rule.weighs_input or (shape.num_shared_experts > 0 and rule.routed != rule.shared)


class SeparateExperts:
    """The experts of a layer, in two calls of `fused_experts`."""

    def __init__(self, shape: LayerShape, weights: ExpertWeights, backend: Backend, rule: ExpertRule) -> None:
        self._backend, self._rule, self._held = backend, rule, len(shape.held_experts)
        self._num_shared = shape.num_shared_experts
        # Made once: the backend knows weights by their tensors.
        self._routed, self._shared = cut(weights, self._held)

    def pack(self, name: str) -> bool:
        """See `MoELayer.pack`; whether the whole matrix is no longer needed."""
        packed = [self._backend.packed(part.matrix(name)) for part in (self._routed, self._shared)]
        self._routed = self._routed.with_matrix(name, packed[0])
        self._shared = self._shared.with_matrix(name, packed[1])
        return packed[0].data.is_meta

    def __call__(
        self,
        hidden_states: Tensor,
        topk: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor],
        num_sms: int | None,
        out: Tensor | None,
        offsets: Tensor | None,
    ) -> Tensor:
        """As `MoELayer.__call__`, with the groups and weights of the routed and of the shared experts."""
        states, ids, weights = hidden_states, *topk
        num_tokens, slots = hidden_states.shape[0], 1
        if self._rule.weighs_input:  # a row for each slot, which then counts fully
            slots = ids.shape[1]
            states = hidden_states.to(torch.float32).repeat_interleave(slots, 0) * weights.view(-1, 1)
            ids, weights = ids.reshape(-1, 1), torch.ones_like(weights).view(-1, 1)
        total = fused_experts(
            states, ids, weights, self._routed.gate_up, self._routed.down,
            activation=self._rule.routed, backend=self._backend, num_sms=num_sms,
            offsets=None if offsets is None else offsets[: self._held + 1],
        )  # fmt: skip
        total = total.view(num_tokens, slots, hidden_states.shape[1]).sum(1)
        if self._num_shared > 0:
            ids, weights = shared
            total += fused_experts(
                hidden_states, (ids - self._held).contiguous(), weights.contiguous(),
                self._shared.gate_up, self._shared.down,
                activation=self._rule.shared, backend=self._backend, num_sms=num_sms,
            )  # fmt: skip
        return total if out is None else out.copy_(total)
