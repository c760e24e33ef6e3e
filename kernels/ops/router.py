"""Chooses each token's experts and their weights from its logits, by the families' rules."""

from collections.abc import Callable

import torch
from torch import Tensor

from expertd.kernels.ops.checks import check_logits
from expertd.routing import Routing

_FAR = 2 * 0.01  # twice the jitter of training
_MIN_SUM = 1e-20  # added to a sum of sigmoids before dividing by it: all of them may be zero


@torch.no_grad()
def choose_experts(
    logits: Tensor, bias: Tensor | None, top_k: int, routing: Routing
) -> tuple[Tensor, Tensor]:
    """(topk_ids int32 [T, top_k], topk_weights fp32 [T, top_k]) of fp32 logits [T, E], best first.

    bias, fp32 [E], is added as `Routing.bias_on` says. Ties between experts and between groups go to the
    lower index, on every device. Has no gradients. Raises ValueError (name, expected, got).
    """
    check_logits(logits, bias, top_k, routing)
    if bias is not None and routing.bias_on == "logits":
        logits, bias = logits + bias, None
    if routing.scoring_func == "sparsemixer":
        return _sparsemixer(logits, top_k, routing)
    scores = _SCORES[routing.scoring_func](logits)
    choice = scores if bias is None else scores + bias
    if routing.topk_group < routing.num_expert_groups:
        choice = _without_other_groups(choice, routing)
    # A stable sort, because topk breaks ties differently on different devices and for different sizes.
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if routing.renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total if routing.scoring_func == "softmax" else total + _MIN_SUM)
    return ids.to(torch.int32), weights * routing.routed_scaling_factor


def _sparsemixer(logits: Tensor, top_k: int, routing: Routing) -> tuple[Tensor, Tensor]:
    """Each choice is the largest logit that is left, with its softmax over those that are close to it.

    Close is what differs by at most 2% of the larger of its own magnitude and the largest logit.
    """
    ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    left, weights = logits, []
    for chosen in ids.unbind(1):
        largest = left.gather(1, chosen[:, None])
        is_far = (largest - logits) / logits.abs().clamp(min=largest) > _FAR
        weights.append(left.masked_fill(is_far, -torch.inf).softmax(dim=-1).gather(1, chosen[:, None]))
        left = left.scatter(1, chosen[:, None], -torch.inf)
    return ids.to(torch.int32), torch.cat(weights, dim=1) * routing.routed_scaling_factor


def _sqrt_softplus(logits: Tensor) -> Tensor:
    return torch.nn.functional.softplus(logits).sqrt()


_SCORES: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": _sqrt_softplus,
}


def _without_other_groups(choice: Tensor, routing: Routing) -> Tensor:
    """choice [T, E] with minus infinity outside each token's topk_group best groups."""
    num_tokens, num_experts = choice.shape
    grouped = choice.view(num_tokens, routing.num_expert_groups, num_experts // routing.num_expert_groups)
    counted = min(1 if routing.group_score == "best" else 2, grouped.shape[2])
    best = grouped.topk(counted, dim=-1).values.sum(dim=-1)
    chosen = best.sort(dim=-1, descending=True, stable=True).indices[:, : routing.topk_group]
    others = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
    return grouped.masked_fill(others[:, :, None], float("-inf")).view(num_tokens, num_experts)
