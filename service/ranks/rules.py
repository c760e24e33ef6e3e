"""Refuses layers that several ranks cannot compute."""

from expertd.activation import COMMON
from expertd.service.engine.layers import rule_of
from expertd.service.moe.weights import ExpertWeights
from expertd.service.settings.served import ModelSettings


def check_on_ranks(model: ModelSettings, weights: ExpertWeights) -> None:
    """Raise ValueError unless the layer's experts, and its shared expert, follow the common rule."""
    got = None
    if weights.shared_gate is not None:
        got = "a gate of the shared expert"
    elif weights.biases is not None:
        got = "biases of the experts"
    elif not model.shape.has_whole_blocks:
        got = f"hidden_size {model.hidden_size}, which is no multiple of 128"
    elif rule_of(model) != COMMON:
        got = "another rule of the experts"
    if got is not None:
        raise ValueError(f"model {model.name}: expected, on several ranks, silu(gate) * up alone, got {got}")
