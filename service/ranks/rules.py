"""Refuses layers that several ranks cannot compute."""

import torch

from expertd.service.engine.layers import rule_of
from expertd.service.moe.weights import ExpertWeights
from expertd.service.settings.served import ModelSettings


def check_on_ranks(model: ModelSettings, weights: ExpertWeights, device: torch.device, moves: bool) -> None:
    """Raise ValueError if ranks on `device` cannot compute the layer; moves: whether experts may.

    GPUs have no biases, no weights on inputs, and only hidden sizes of whole blocks; and no biases move.
    """
    got = None
    if weights.biases is not None and (moves or device.type != "cpu"):
        got = "biases of the experts"
    elif device.type != "cpu" and not model.shape.has_whole_blocks:
        got = f"hidden_size {model.hidden_size}, which is no multiple of 128"
    elif device.type != "cpu" and rule_of(model).weighs_input:
        got = "weights on the experts' input"
    if got is not None:
        where = "with placement.policy" if device.type == "cpu" else "on several GPUs"
        raise ValueError(f"model {model.name}: expected, {where}, weighted outputs without biases, got {got}")
