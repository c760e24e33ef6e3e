"""Experts whose rule needs two calls: one for the routed experts, one for the shared ones."""

import torch
from torch import Tensor

from expertd.activation import ExpertRule
from expertd.kernels import Backend, HiddenStates, Stages, as_floats, fused_experts, values_of
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights, cut


def has_two_rules(shape: LayerShape, rule: ExpertRule) -> bool:
    """Whether a layer's routed and shared experts compute something else."""
    return rule.weighs_input or (shape.num_shared_experts > 0 and rule.routed != rule.shared)


def needs_two_calls(shape: LayerShape, rule: ExpertRule) -> bool:
    """Whether one call of `fused_experts` cannot compute a layer's routed and shared experts together."""
    return has_two_rules(shape, rule) or shape.splits_shared


def rows_per_token(top_k: int, rule: ExpertRule) -> int:
    """The rows that a token is for the routed experts: one for each slot if weights multiply their input."""
    return top_k if rule.weighs_input else 1


def weighed_rows(
    hidden_states: HiddenStates, topk_ids: Tensor, topk_weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A row for each slot, which its weight has multiplied, and which then counts fully.

    Returns hidden_states fp32 [T * top_k, H], topk_ids and topk_weights [T * top_k, 1], all contiguous.
    """
    rows = as_floats(hidden_states).to(torch.float32).repeat_interleave(topk_ids.shape[1], 0)
    rows = rows * topk_weights.view(-1, 1)
    return rows, topk_ids.reshape(-1, 1), torch.ones_like(topk_weights).view(-1, 1)


class SeparateExperts:
    """The experts of a layer, in two calls of `fused_experts`."""

    def __init__(self, shape: LayerShape, weights: ExpertWeights, backend: Backend, rule: ExpertRule) -> None:
        self._backend, self._rule, self._held = backend, rule, len(shape.held_experts)
        self._num_shared = shape.num_shared_experts
        # Made once: the backend caches by tensor identity.
        self._routed, self._shared = cut(weights, self._held)

    def pack(self, name: str) -> bool:
        """See `MoELayer.pack`; whether the whole matrix is no longer needed."""
        pairs = name == "gate_up"
        packed = [
            self._backend.packed(part.matrix(name), pairs=pairs) for part in (self._routed, self._shared)
        ]
        self._routed = self._routed.with_matrix(name, packed[0])
        self._shared = self._shared.with_matrix(name, packed[1])
        return packed[0].data.is_meta

    def __call__(
        self,
        hidden_states: HiddenStates,
        topk: tuple[Tensor, Tensor],
        shared: tuple[Tensor, Tensor],
        num_sms: int | None,
        out: Tensor | None,
        offsets: Tensor | None,
        stages: Stages | None = None,
    ) -> Tensor:
        """As `MoELayer.__call__`, with the groups and weights of the routed and of the shared experts."""
        states, ids, weights = operands = hidden_states, *topk
        (num_tokens, h), each = values_of(hidden_states).shape, rows_per_token(ids.shape[1], self._rule)
        if self._rule.weighs_input:
            states, ids, weights = weighed_rows(*operands)
        total = fused_experts(
            states, ids, weights, self._routed.gate_up, self._routed.down,
            activation=self._rule.routed, backend=self._backend, num_sms=num_sms,
            offsets=None if offsets is None else offsets[: self._held + 1], stages=stages,
        )  # fmt: skip
        total = total.view(num_tokens, each, h).sum(1)
        if self._num_shared > 0:
            ids, weights = shared
            total += fused_experts(
                hidden_states, (ids - self._held).contiguous(), weights.contiguous(),
                self._shared.gate_up, self._shared.down,
                activation=self._rule.shared, backend=self._backend, num_sms=num_sms, stages=stages,
            )  # fmt: skip
        return total if out is None else out.copy_(total)
