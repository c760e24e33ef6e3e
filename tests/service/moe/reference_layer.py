"""An MoE layer in float64, one token and one expert at a time; shares no code with the implementation."""

import torch
from torch import Tensor

from expertd.kernels import dequantize_blocks
from expertd.service.moe.weights import ExpertWeights
from tests.kernels.helpers import diff
from tests.kernels.reference_routing import reference_routing


def assert_close(out: Tensor, expected: Tensor) -> None:
    """Fail unless out [T, H] is as close as rounding the activations to FP8 twice allows for T tokens.

    On average that costs a `diff` of 1.0e-3 for any T; the worst of 3000 single tokens had 3.1e-3, and for
    eleven tokens together the standard deviation is 0.1e-3. A CPU's contiguous layout rounds them only to
    bf16, which costs a hundredth of that (`test_a_cpu_rounds_activations_only_to_bf16`).
    """
    limit = 2e-3 if expected.shape[0] >= 16 else 1e-2
    error = diff(out, expected)
    assert error < limit, f"diff {error:.3g} of {expected.shape[0]} tokens, expected less than {limit}"


def reference_layer(
    hidden_states: Tensor,
    weights: ExpertWeights,
    top_k: int,
    *,
    renormalize: bool = True,
    topk_ids: Tensor | None = None,
    topk_weights: Tensor | None = None,
    num_shared_experts: int = 0,
    held_experts: range | None = None,
) -> Tensor:
    """The layer's output in float64 [T, H]; only the weights are rounded."""
    num_groups = weights.gate_up.data.shape[0]
    num_held = num_groups - num_shared_experts
    held = range(num_held) if held_experts is None else held_experts
    outputs = []
    for token, hidden in enumerate(hidden_states.to(weights.router.device).double()):
        if topk_ids is None or topk_weights is None:
            chosen = reference_routing(hidden, weights.router, top_k, renormalize)
        else:
            chosen = dict(zip(topk_ids[token].tolist(), topk_weights[token].tolist(), strict=True))
        total = torch.zeros_like(hidden)
        for expert, weight in chosen.items():
            if expert in held:
                total += weight * _expert(hidden, weights, held.index(expert))
        for group in range(num_held, num_groups):
            total += _expert(hidden, weights, group)
        outputs.append(total)
    return torch.stack(outputs).to(hidden_states.device)


def _expert(hidden: Tensor, weights: ExpertWeights, group: int) -> Tensor:
    gate_up = dequantize_blocks(weights.gate_up.data[group], weights.gate_up.scales[group]).double()
    down = dequantize_blocks(weights.down.data[group], weights.down.scales[group]).double()
    intermediate_size = gate_up.shape[0] // 2
    gate = gate_up[:intermediate_size] @ hidden
    up = gate_up[intermediate_size:] @ hidden
    return down @ (gate / (1 + torch.exp(-gate)) * up)
