"""The activations between an expert's two GEMMs."""

import math
from typing import NamedTuple


class Swiglu(NamedTuple):
    """gate * sigmoid(alpha * gate) * up, with gate clamped to at most limit and up to [-limit, limit].

    Most families use alpha 1 and no limit, which is silu(gate) * up.
    """

    alpha: float = 1.0
    limit: float = math.inf


class OtherGlu(NamedTuple):
    """As Swiglu, with two variations; no kernel fuses it with a GEMM.

    up_offset    added to up once it is clamped
    clamp_after  clamp gate * sigmoid(alpha * gate) to at most limit, instead of gate
    """

    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0
    clamp_after: bool = False


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


COMMON = ExpertRule()
"""silu(gate) * up, and weighted outputs: what most families compute."""
