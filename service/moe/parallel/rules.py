"""What ranks compute of a layer's rules, and what not."""

from torch import Tensor

from expertd.activation import ExpertRule
from expertd.service.moe.weights import ExpertWeights


def check_rule(rule: ExpertRule, weights: ExpertWeights) -> None:
    """Raise ValueError if several ranks cannot compute a layer with this rule and these weights."""
    if rule.weighs_input:
        raise ValueError(
            "rule: expected, on several ranks, weights on the experts' output, got on their input"
        )
    if weights.biases is not None:
        raise ValueError("biases: expected, on several ranks, none of the experts, got some")


def gate_of(weights: ExpertWeights, hidden_states: Tensor) -> Tensor | None:
    """fp32 [T, 1]: what the shared experts' output is multiplied by; None: nothing."""
    if weights.shared_gate is None:
        return None
    return (hidden_states.float() @ weights.shared_gate.float()).sigmoid()[:, None]
