"""Refuses layers whose experts cannot move between ranks."""

from expertd.service.moe.weights import ExpertWeights
from expertd.service.settings.served import ModelSettings


def check_moves(model: ModelSettings, weights: ExpertWeights, moves: bool) -> None:
    """Raise ValueError if experts are to move that have biases, which do not."""
    if moves and weights.biases is not None:
        expected = "expected, with placement.policy, experts without biases"
        raise ValueError(f"model {model.name}: {expected}, got biases of the experts")
