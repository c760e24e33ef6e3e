"""How a token's experts are chosen and weighed: from logits to ids and weights, by the families' rules."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_LEAST_SUM = 1e-20  # added to a sum of sigmoids, which may all be zero, before it divides


@dataclass(frozen=True)
class Routing:
    """A router's rule.

    scoring      "softmax" over all experts (Mixtral, Qwen3-MoE) or "sigmoid" of each (DeepSeek-V3, Kimi-K2,
                 GLM-4.5, MiniMax-M2)
    renormalize  a token's weights are divided by their sum
    scale        what they are multiplied by then
    groups       experts stand in this many equal groups, and a token's are all from its best
    top_groups   of them; a group is as good as its two best experts together

    Source: the routers of transformers 5.23 (deepseek_v3, glm4_moe, minimax_m2, mixtral, qwen3_moe).
    Raises ValueError (name, expected, got) for a rule that chooses from no group.
    """

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if self.scoring not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring: expected 'softmax' or 'sigmoid', got {self.scoring!r}")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups: expected 1 to groups ({self.groups}), got {self.top_groups}")

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise ValueError unless num_experts fall into the groups, and the best of these have top_k."""
        if num_experts % self.groups != 0:
            raise ValueError(f"num_experts: expected a multiple of groups ({self.groups}), got {num_experts}")
        eligible = num_experts // self.groups * self.top_groups
        if top_k > eligible:
            raise ValueError(f"top_k: expected at most the {eligible} experts of top_groups, got {top_k}")


def choose_experts(
    logits: Tensor, bias: Tensor | None, top_k: int, routing: Routing
) -> tuple[Tensor, Tensor]:
    """(topk_ids int32 [T, k], topk_weights fp32 [T, k]) of fp32 logits [T, E], best first.

    bias, fp32 [E], is added to the scores that choose, and never to the weights. Of equal experts, and of
    equal groups, the lower is chosen, on every device.
    """
    scores = logits.softmax(dim=-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.top_groups < routing.groups:
        choice = _without_other_groups(choice, routing)
    # A stable sort, because which of equal values topk takes differs between devices and sizes.
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if routing.renormalize:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total if routing.scoring == "softmax" else total + _LEAST_SUM)
    return ids.to(torch.int32), weights * routing.scale


def _without_other_groups(choice: Tensor, routing: Routing) -> Tensor:
    """choice [T, E] with minus infinity outside each token's best groups."""
    num_tokens, num_experts = choice.shape
    grouped = choice.view(num_tokens, routing.groups, num_experts // routing.groups)
    best_two = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(dim=-1)
    chosen = best_two.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_groups]
    others = torch.ones_like(best_two, dtype=torch.bool).scatter(1, chosen, False)
    return grouped.masked_fill(others[:, :, None], float("-inf")).view(num_tokens, num_experts)
