"""The activations between an expert's two GEMMs."""

import math
from typing import NamedTuple


class Swiglu(NamedTuple):
    """gate * sigmoid(alpha * gate) * up, with gate clamped to at most limit and up to [-limit, limit].

    Most families use alpha 1 and no limit, which is silu(gate) * up.
    """

    alpha: float = 1.0
    limit: float = math.inf

    @property
    def text(self) -> str:
        """As a formula."""
        gate, up = _clamped("gate", -math.inf, self.limit), _clamped("up", -self.limit, self.limit)
        return f"{_activated(gate, self.alpha)} * {up}"


class OtherGlu(NamedTuple):
    """As Swiglu, with two variations; on Hopper, GEMMs with it have tiles of their own.

    up_offset    added to up once it is clamped
    clamp_after  clamp gate * sigmoid(alpha * gate) to at most limit, instead of gate
    """

    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0
    clamp_after: bool = False

    @property
    def text(self) -> str:
        """As a formula."""
        gate = "gate" if self.clamp_after else _clamped("gate", -math.inf, self.limit)
        activated = _activated(gate, self.alpha)
        if self.clamp_after:
            activated = _clamped(activated, -math.inf, self.limit)
        up = _clamped("up", -self.limit, self.limit)
        return f"{activated} * ({up} + {self.up_offset:g})" if self.up_offset else f"{activated} * {up}"


Activation = Swiglu | OtherGlu
SILU = Swiglu()


class ExpertRule(NamedTuple):
    """What a layer's experts compute.

    routed, shared  the activation of the routed experts, and of the shared ones
    weighs_input    a routing weight multiplies an expert's input instead of its output (Llama 4)
    """

    routed: Activation = SILU
    shared: Activation = SILU
    weighs_input: bool = False

    @property
    def text(self) -> str:
        """For people."""
        routed, shared = f"down({self.routed.text})", f"down({self.shared.text})"
        parts = [routed if self.routed == self.shared else f"{routed}, shared ones {shared}"]
        if self.weighs_input:
            parts.append("weights on their input")
        return ", ".join(parts)


def _clamped(text: str, low: float, high: float) -> str:
    if high == math.inf:
        return text
    return f"min({text}, {high:g})" if low == -math.inf else f"clamp({text}, {high:g})"


def _activated(gate: str, alpha: float) -> str:
    return f"silu({gate})" if alpha == 1 else f"{gate} * sigmoid({alpha:g} * {gate})"


COMMON = ExpertRule()
"""silu(gate) * up, and weighted outputs: what most families compute."""
