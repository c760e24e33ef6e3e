"""Refuses layers that several ranks cannot compute."""

from expertd.service.engine.layers import rule_of
from expertd.service.moe.weights import ExpertWeights
from expertd.service.settings.served import ModelSettings


def check_on_ranks(model: ModelSettings, weights: ExpertWeights) -> None:
    """Raise ValueError if the layer has biases, weights on inputs, or a hidden size of no whole blocks."""
    got = None
    if weights.biases is not None:
        got = "biases of the experts"
    elif not model.shape.has_whole_blocks:
        got = f"hidden_size {model.hidden_size}, which is no multiple of 128"
    elif rule_of(model).weighs_input:
        got = "weights on the experts' input"
    if got is not None:
        raise ValueError(
            f"model {model.name}: expected, on several ranks, weighted outputs without biases, got {got}"
        )
