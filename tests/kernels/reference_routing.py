"""Softmax routing in float64, one token at a time, without any code of the implementation; and the rules and
sizes with which routers on GPUs are tested.
"""

import torch
from torch import Tensor

from expertd.kernels import Routing

ROUTINGS = (
    Routing(),
    Routing(renormalize=False),
    Routing("sigmoid", routed_scaling_factor=2.5),
    Routing("sigmoid", True, 2.5, 8, 4),
    Routing(bias_on="logits"),
    Routing("sigmoid", bias_on="logits"),
)
ODD_SIZES = (
    (1, 1, Routing()),
    (7, 7, Routing("sigmoid")),
    (33, 32, Routing()),
    (96, 32, Routing("sigmoid", num_expert_groups=32, topk_group=11)),
    (32, 3, Routing("sigmoid", num_expert_groups=32, topk_group=3)),
    (1023, 5, Routing(renormalize=False)),
    (1024, 32, Routing("sigmoid", True, 2.5, 2, 1)),
)
"""(num_experts, top_k, routing)."""


def reference_routing(hidden: Tensor, router: Tensor, top_k: int, renormalize: bool) -> dict[int, float]:
    """Maps experts to weights for one token [H]: softmax over all experts, then the best top_k."""
    exponentials = torch.exp(router.double() @ hidden.double())
    probabilities = (exponentials / exponentials.sum()).tolist()
    best = sorted(range(len(probabilities)), key=lambda e: (-probabilities[e], e))[:top_k]
    total = sum(probabilities[e] for e in best) if renormalize else 1.0
    return {e: probabilities[e] / total for e in best}
