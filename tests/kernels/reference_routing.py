"""Softmax routing in float64, one token at a time, that shares no code with the real one."""

import torch
from torch import Tensor


def reference_routing(hidden: Tensor, router: Tensor, top_k: int, renormalize: bool) -> dict[int, float]:
    """Expert to weight of one token [H]: softmax over all experts, the best top_k of them."""
    exponentials = torch.exp(router.double() @ hidden.double())
    probabilities = (exponentials / exponentials.sum()).tolist()
    best = sorted(range(len(probabilities)), key=lambda e: (-probabilities[e], e))[:top_k]
    total = sum(probabilities[e] for e in best) if renormalize else 1.0
    return {e: probabilities[e] / total for e in best}
