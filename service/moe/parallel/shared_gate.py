"""The gate of the shared experts, for layers whose ranks add these themselves."""

from torch import Tensor

from expertd.kernels import HiddenStates, as_floats
from expertd.service.moe.weights import ExpertWeights


def gate_of(weights: ExpertWeights, hidden_states: HiddenStates) -> Tensor | None:
    """fp32 [T, 1]: what the shared experts' output is multiplied by; None: nothing."""
    if weights.shared_gate is None:
        return None
    return (as_floats(hidden_states).float() @ weights.shared_gate.float()).sigmoid()[:, None]
