"""The MoE layer on top of `kernels`: weights, the layer and the runner that feeds it bytes."""

from expertd.service.moe.layer import MoELayer
from expertd.service.moe.runner import LayerRequest, LayerRunner, StepResult, zero_request
from expertd.service.moe.shape import LayerShape
from expertd.service.moe.weights import ExpertWeights, load_weights, random_weights, save_weights

__all__ = [
    "ExpertWeights",
    "LayerRequest",
    "LayerRunner",
    "LayerShape",
    "MoELayer",
    "StepResult",
    "load_weights",
    "random_weights",
    "save_weights",
    "zero_request",
]
