"""Softmax routing in float64, one token at a time; shares no code with the implementation."""

import torch
from torch import Tensor


def reference_routing(hidden: Tensor, router: Tensor, top_k: int, renormalize: bool) -> dict[int, float]:
    """Maps experts to weights for one token [H]: softmax over all experts, then the best top_k."""
    exponentials = torch.exp(router.double() @ hidden.double())
    probabilities = (exponentials / exponentials.sum()).tolist()
    best = sorted(range(len(probabilities)), key=lambda e: (-probabilities[e], e))[:top_k]
    total = sum(probabilities[e] for e in best) if renormalize else 1.0
    return {e: probabilities[e] / total for e in best}
