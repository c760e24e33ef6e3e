"""Layers of every rule of experts, and their output in float64, written without the implementation."""

from dataclasses import replace

import torch
from torch import Tensor

from expertd.activation import COMMON, Activation, ExpertRule, OtherGlu, Swiglu
from expertd.kernels import dequantize_blocks
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights, random_weights

SHAPE = LayerShape(256, 128, 6, 3, num_shared_experts=2)
RULES = {
    "clamped": ExpertRule(Swiglu(1.0, 0.5), Swiglu(1.0, 0.5)),
    "offset": ExpertRule(OtherGlu(1.702, 0.5, 1.0), OtherGlu(1.702, 0.5, 1.0)),
    "clamped after": ExpertRule(OtherGlu(1.0, 0.2, 0.0, True), OtherGlu(1.0, 0.2, 0.0, True)),
    "routed clamped": ExpertRule(Swiglu(1.0, 0.5)),
    "shared clamped": ExpertRule(shared=OtherGlu(1.0, 0.2, 0.0, True)),
    "weighed input": ExpertRule(weighs_input=True),
    "common": COMMON,
}


def gated_weights(device: torch.device | str = "cpu") -> ExpertWeights:
    """Random weights of SHAPE, with a gate of the shared experts."""
    gate = torch.linspace(-0.2, 0.3, SHAPE.hidden_size, device=device)
    return replace(random_weights(SHAPE, 3, device), shared_gate=gate)


def expected(
    hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: ExpertWeights, rule: ExpertRule
) -> Tensor:
    """The layer's output in float64 on the CPU: one token and one expert at a time."""
    rows = []
    for token, hidden in enumerate(hidden_states.double().cpu()):
        total = torch.zeros_like(hidden)
        for expert, weight in zip(topk_ids[token].tolist(), topk_weights[token].tolist(), strict=True):
            if rule.weighs_input:
                total += _expert(hidden * weight, weights, expert, rule.routed)
            else:
                total += weight * _expert(hidden, weights, expert, rule.routed)
        gate = 1.0
        if weights.shared_gate is not None:
            gate = float(1 / (1 + torch.exp(-(weights.shared_gate.double().cpu() @ hidden))))
        for group in range(SHAPE.num_experts, SHAPE.num_groups):
            total += gate * _expert(hidden, weights, group, rule.shared)
        rows.append(total)
    return torch.stack(rows)


def _expert(hidden: Tensor, weights: ExpertWeights, group: int, activation: Activation) -> Tensor:
    gate_up, down = (
        dequantize_blocks(matrix.data[group], matrix.scales[group]).double().cpu()
        for matrix in (weights.gate_up, weights.down)
    )
    gate, up = (gate_up @ hidden).chunk(2)
    limit = activation.limit
    clamp_after = isinstance(activation, OtherGlu) and activation.clamp_after
    if not clamp_after:
        gate = gate.minimum(torch.tensor(limit))
    gate = gate / (1 + torch.exp(-activation.alpha * gate))
    if clamp_after:
        gate = gate.minimum(torch.tensor(limit))
    up = up.clamp(-limit, limit) + (activation.up_offset if isinstance(activation, OtherGlu) else 0.0)
    return down @ (gate * up)
