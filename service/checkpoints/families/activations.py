"""The activations of families where they are not silu(gate) * up."""

from collections.abc import Callable

from expertd.activation import SILU, Activation, OtherGlu, Swiglu
from expertd.service.checkpoints.config import Config

ActivationRule = Callable[[Config, int], tuple[Activation, Activation]]
"""Config and a layer's number to the activations of its routed experts, and of its shared ones."""


def silu(config: Config, layer: int) -> tuple[Activation, Activation]:
    """silu(gate) * up"""
    config.expect("hidden_act", "silu")
    return SILU, SILU


def clamped(config: Config, layer: int) -> tuple[Activation, Activation]:
    """silu(gate) * up, both clamped before"""
    config.expect("hidden_act", "silu")
    activation = Swiglu(1.0, config.positive("swiglu_limit", default=10.0))
    return activation, activation


def routed_clamped(config: Config, layer: int) -> tuple[Activation, Activation]:
    """silu(gate) * up, both clamped before in routed experts"""
    return clamped(config, layer)[0], SILU


def clamped_by_layer(config: Config, layer: int) -> tuple[Activation, Activation]:
    """silu(gate) * up, silu(gate) and up clamped in some layers"""
    config.expect("hidden_act", "silu")
    limits = config.entry("swiglu_limits", layer), config.entry("swiglu_limits_shared", layer)
    routed, shared = (OtherGlu(1.0, limit, 0.0, True) if limit else SILU for limit in limits)
    return routed, shared


def swigluoai(config: Config, layer: int) -> tuple[Activation, Activation]:
    """gate * sigmoid(alpha * gate) * (up + 1), gate and up clamped before"""
    config.expect("hidden_act", "swigluoai", "silu")  # transformers saves it as silu
    alpha = config.positive("swiglu_alpha", default=1.702)
    activation = OtherGlu(alpha, config.positive("swiglu_limit", default=7.0), 1.0)
    return activation, activation
