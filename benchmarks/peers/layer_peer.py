"""What a peer of the whole layer is."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.layer.problem import Layer, LayerProblem

BLOCK = [128, 128]  # of weights that share a scale


@dataclass(frozen=True)
class LayerPeer:
    """One implementation of a layer of experts, from bf16 hidden states with routing given to their sums.

    available  whether its packages are installed
    version    of its package
    prepare    the call, which returns its output bf16 [T, H]
    tuned      whether it has a configuration tuned for this GPU and layer; None: it has none to tune
    """

    name: str
    available: Callable[[], bool]
    version: Callable[[], str]
    prepare: Callable[[LayerProblem], Callable[[], Tensor]]
    tuned: Callable[[Layer], bool] | None = None
